/* What a recorded decision makes of one value, in C for processors and GPUs: rounding cells, and the codes next to a
 * value. The definitions are decoding.py and cells.py; z is the magnitude on the grid, m its nearest magnitude code. */

#ifndef TRACEFP4_CELLS_H
#define TRACEFP4_CELLS_H

#include "../e2m1.h"
#include "keys.h"

/* What decides between codewords: nearest even alone, a recorded code, one or two recorded low bits, or syndromes. */
enum rule { NEAREST, FULL, BRACKET, NEAREST_CELL, LOW2_BRACKET, LOW2_CELL, SYNDROMES };
#define UNITS 4096.0f
#define PLAUSIBLE_DISTANCE 0.5f
#define INFINITY __builtin_inff()

/* Whether z lies at or below the middle of the cell of m, its nearest code: the value, plus m / 2 - 1 eighths if m is
 * even. */
INLINE int32_t is_in_lower_half(float z, int32_t m) {
    int32_t eighths = ((m >> 1) - 1) & ((m & 1) - 1);
    return z <= code_magnitude(m) + 0.125f * (float)eighths;
}

/* From m to the code of the other parity whose cell is nearest to z. */
INLINE int32_t alternative_step(float z, int32_t m) { return 1 - 2 * is_in_lower_half(z, m); }

/* How far z, whose nearest code is m, lies from the cell of another code. */
INLINE float cell_distance(float z, int32_t m, int32_t other) {
    int32_t inner = other + (other < m) - (other > m);
    float edge = 0.5f * (code_magnitude(other) + code_magnitude(inner));
    return float_of(bits_of(edge - z) & MAGNITUDE_BITS);
}

/* The magnitude code that the decision asks for; m is the nearest one. */
INLINE int32_t follow(enum rule rule, float z, int32_t m, uint32_t decision, uint32_t sign) {
    float nearest = code_magnitude(m);
    int32_t is_above = z > nearest, is_below = z < nearest;
    if (rule == FULL) { /* a code of the other sign is followed as far as 0 */
        int32_t goal = (int32_t)choose((decision >> 3 & 1) == sign, decision & 7, 0);
        return least(most(goal, m - is_below), m + is_above);
    }
    if (rule == LOW2_BRACKET) {
        int32_t end = m + is_above - is_below;
        return (int32_t)choose((((uint32_t)end ^ decision) & 3) == 0, (uint32_t)end, (uint32_t)m);
    }
    if (rule == LOW2_CELL) { /* the cells of r and r + 4 are equally far from 1, 1.625, 2.375 and 3.375 */
        int32_t low = (int32_t)(decision & 3);
        float middle = 1.0f + 0.625f * (float)(low > 0) + 0.75f * (float)(low > 1) + 1.0f * (float)(low > 2);
        return low + 4 * (z > middle);
    }
    int32_t is_mismatched = (int32_t)(((uint32_t)m ^ decision) & 1);
    if (rule == BRACKET) return m + is_mismatched * (is_above - is_below);
    return m + is_mismatched - 2 * (is_mismatched & is_in_lower_half(z, m));
}

/* The key of a value for a search: its distance to the cell of its alternative, and its index in the block. */
INLINE int32_t key_of_value(float z, int32_t m, float limit, int index) {
    float distance = cell_distance(z, m, m + alternative_step(z, m));
    int is_candidate = distance <= limit;
    float units = float_of(choose(is_candidate, bits_of(distance * UNITS), 0));
    return (int32_t)choose(is_candidate, (uint32_t)((int32_t)units << INDEX_BITS | index), NO_CANDIDATE);
}

#endif
