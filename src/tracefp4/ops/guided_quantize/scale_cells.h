/* What recorded low bits make of the byte of one scale, in C for processors and GPUs; scale_decoding.py is the
 * definition. */

#ifndef TRACEFP4_SCALE_CELLS_H
#define TRACEFP4_SCALE_CELLS_H

#include "../scaling.h"
#include "keys.h"

/* How scales were recorded: as bytes, as syndromes, or as the low bits that a step of 2 or 4 leaves. */
enum { RAW_SCALES = 0, SYNDROMES_OF_SCALES = 1 };
#define SCALE_UNITS 65536.0f
#define PLAUSIBLE_SCALE_DISTANCE 0x1p-5f
enum { MAX_E4M3_BYTE = 126, MAX_E8M0_BYTE = 254 };

/* The numbers that n bytes were rounded from; the value of the byte where the scheme does not store the rounded one. */
INLINE void e4m3_targets(enum order order, int n, const int32_t *restrict amax_bits, struct outer outer,
                         const uint32_t *restrict byte, float *restrict target) {
    for (int g = 0; g < n; g++) {
        float raw = raw_block_scale(order, float_of((uint32_t)amax_bits[g]), outer);
        uint32_t bits = (uint32_t)least((int32_t)bits_of(raw), MAX_SCALE_BITS);
        int is_rounded = (encode_e4m3(float_of(bits)) == byte[g]) & (amax_bits[g] != 0);
        target[g] = float_of(choose(is_rounded, bits, bits_of(decode_e4m3(byte[g]))));
    }
}

static void targets_of_maxima(const struct scheme *scheme, int n, const int32_t *amax_bits, struct outer outer,
                              const uint32_t *byte, float *target) {
    FOR_ORDER(scheme->order, e4m3_targets, n, amax_bits, outer, byte, target)
}

/* The number halfway between the values of two bytes; bytes beyond 0..126 count as these. */
INLINE float middle_of(int32_t lower, int32_t upper) {
    return 0.5f * (decode_e4m3((uint32_t)most(lower, 0)) + decode_e4m3((uint32_t)least(upper, MAX_E4M3_BYTE)));
}

/* The bytes of a strip that have the recorded low bits and are nearest to the own scales. */
static void cosets_of_strip(const struct scheme *scheme, const struct strip *strip, struct outer outer, int step,
                            const uint8_t *recorded, uint8_t *block_scales) {
    uint32_t own[BLOCKS];
    float target[BLOCKS];
    int n = strip->num_blocks, top = scheme->order == MX ? MAX_E8M0_BYTE : MAX_E4M3_BYTE;
    if (scheme->order != MX) {
        bytes_of_maxima(scheme, n, strip->amax_bits, outer, 1.0f, own);
        targets_of_maxima(scheme, n, strip->amax_bits, outer, own, target);
    }
    for (int g = 0; g < n; g++) {
        int32_t fraction = 0, own_byte;
        if (scheme->order == MX) {
            fraction = unrounded_e8m0(scheme, strip->amax_bits[g]);
            own_byte = fraction >> 23;
        } else {
            own_byte = (int32_t)own[g];
        }
        int32_t lower = own_byte - ((own_byte - (recorded[g] & (step - 1))) & (step - 1)), upper = lower + step;
        int is_above = scheme->order == MX ? fraction > (int64_t)(lower + upper + 1) * 0x400000
                                           : target[g] > middle_of(lower, upper);
        block_scales[g] = (uint8_t)((is_above && upper <= top) || lower < 0 ? upper : lower);
    }
}

/* The keys of n scales for a search, the first of them with this index, and the bytes that they would be flipped to.
 * A block that is not finite is a candidate of distance 0, since its bit is unknown, and its byte stays NaN. */
static void key_scales(int n, const int32_t *restrict amax_bits, const uint32_t *restrict own,
                       const float *restrict target, int first, int32_t *restrict key, uint32_t *restrict other) {
    for (int g = 0; g < n; g++) {
        int32_t byte = (int32_t)own[g], index = first + g, is_finite = amax_bits[g] < INF_BITS;
        float up = middle_of(byte, byte + 1) - target[g], down = target[g] - middle_of(byte - 1, byte);
        int goes_up = ((up < down) & (byte < MAX_E4M3_BYTE)) | (byte == 0);
        float distance = float_of(choose(goes_up, bits_of(up), bits_of(down))) / target[g];
        int is_candidate = (distance <= PLAUSIBLE_SCALE_DISTANCE) & (amax_bits[g] != 0) & is_finite;
        float units = float_of(choose(is_candidate, bits_of(distance * SCALE_UNITS), 0));
        key[g] = (int32_t)choose(is_candidate | !is_finite, (uint32_t)((int32_t)units << INDEX_BITS | index),
                                 NO_CANDIDATE);
        other[g] = (uint32_t)choose(is_finite, (uint32_t)(byte - 1 + 2 * goes_up), NAN_BYTE);
    }
}

#endif
