/* Guides that need to know how far a value is from the next cell: two low bits, the noise gate, and syndromes. The
 * definitions are decoding.py and cells.py.
 *
 * A row is taken in segments of whole blocks of the scheme and of the code, which stay in the first-level cache:
 * brought onto the grid, decided, and written. */

#ifndef TRACEFP4_SEGMENTS_H
#define TRACEFP4_SEGMENTS_H

#include "../scaling.h"
#include "cells.h"
#include "search.h"

enum {
    SEGMENT = 2048,            /* at least the common multiple of any two block lengths, which is 63 * 32 */
    SEGMENT_BLOCKS = SEGMENT / 16
};

/* What is written. */
struct result {
    void *values;   /* float32 or bf16, as x */
    uint8_t *codes; /* NULL: not wanted */
};

/* What the scale bytes of a strip stand for. */
struct scales {
    float unit[BLOCKS];
    float decode_scale[BLOCKS]; /* value = magnitude * decode_scale */
    float factor[BLOCKS];       /* z = |x| / factor or |x| * factor */
};

/* Up to SEGMENT elements of a row on the grid. */
struct segment {
    int n;
    float z[SEGMENT];              /* |z|, at most 6; -infinity, far from every cell, without a usable scale */
    uint8_t code[SEGMENT];         /* the nearest, then the decided one */
    float decode_scale[SEGMENT_BLOCKS];
    uint8_t is_finite[SEGMENT_BLOCKS];
};

/* Bring a strip onto the grid, from element `at` of the segment on. */
INLINE void place_strip(enum dtype dtype, int multiplies, enum tie tie, enum zero zero, int block,
                        const struct strip *strip, const struct scales *scales, struct segment *segment, int at) {
    uint32_t code[STRIP];
    float *restrict z_of = segment->z + at;
    const void *x = strip->x;
    int64_t i = strip->i;
    int n = strip->num_blocks * block;
    for (int start = 0; start < n; start += LANES) {
        float by = scales->factor[start / block];
        uint32_t keep = strip->amax_bits[start / block] < INF_BITS ? 0xFFFFFFFF : 0;
        for (int j = start; j < start + LANES; j++) {
            uint32_t bits = load_bits(x, dtype, i + j) & keep, magnitude_bits = bits & MAGNITUDE_BITS;
            uint32_t sign = bits >> 31;
            if (zero != KEPT) sign = choose(magnitude_bits == 0, zero == NEGATIVE, sign) & keep;
            float magnitude = float_of(magnitude_bits);
            float z = multiplies ? magnitude * by : magnitude / by;
            z = z < 6.0f ? z : 6.0f;
            z_of[j] = z;
            code[j] = (uint32_t)magnitude_code(z, tie) | sign << 3;
        }
    }
    for (int j = 0; j < n; j++) segment->code[at + j] = (uint8_t)code[j];
}

static void place_under(enum dtype dtype, const struct scheme *scheme, const struct strip *strip,
                        const struct scales *scales, struct segment *segment, int at) {
    enum tie tie = (enum tie)scheme->tie;
    enum zero zero = (enum zero)scheme->zero;
    int multiplied = multiplies((enum order)scheme->order);
    if (tie == TO_EVEN && zero == KEPT && scheme->block == 16 && !multiplied) {
        FOR_DTYPE(dtype, place_strip, 0, TO_EVEN, KEPT, 16, strip, scales, segment, at)
    } else {
        FOR_DTYPE(dtype, place_strip, multiplied, tie, zero, scheme->block, strip, scales, segment, at)
    }
}

/* Bring the n elements from i on onto the grid, under the bytes that `block_scales` holds. */
static void place_segment(const struct scheme *scheme, const void *x, enum dtype dtype, int64_t i, int n,
                          struct outer outer, uint8_t *block_scales, struct segment *segment) {
    segment->n = n;
    for (int at = 0; at < n;) {
        struct strip strip;
        struct scales scales;
        uint32_t byte[BLOCKS];
        int block = at / scheme->block;
        read_strip(scheme, x, dtype, i + at, n - at, &strip);
        read_block_scales(scheme, &strip, block_scales, byte);
        decode_bytes(scheme, strip.num_blocks, byte, outer, scales.unit, scales.decode_scale, scales.factor);
        write_block_scales(scheme, &strip, byte, block_scales);
        memcpy(segment->decode_scale + block, scales.decode_scale, (size_t)strip.num_blocks * sizeof(float));
        for (int g = 0; g < strip.num_blocks; g++) segment->is_finite[block + g] = strip.amax_bits[g] < INF_BITS;
        place_under(dtype, scheme, &strip, &scales, segment, at);
        for (int g = 0; g < strip.num_blocks; g++)
            if (!(scales.decode_scale[g] > 0.0f))
                for (int j = 0; j < scheme->block; j++) segment->z[at + g * scheme->block + j] = -INFINITY;
        at += strip.num_blocks * scheme->block;
    }
}

/* Decide every value of a segment by its own decision; returns how many codes changed. */
INLINE int64_t decide(enum rule rule, float band, int block, const uint8_t *decisions, struct segment *segment,
                      int64_t *in_band) {
    int32_t num_changed = 0, num_near = 0;
    for (int start = 0; start < segment->n; start += LANES) {
        int32_t is_guided = segment->decode_scale[start / block] > 0.0f;
        uint32_t code[LANES], decision[LANES];
        for (int j = 0; j < LANES; j++) code[j] = segment->code[start + j];
        for (int j = 0; j < LANES; j++) decision[j] = decisions[start + j];
        for (int j = 0; j < LANES; j++) {
            int32_t m = (int32_t)(code[j] & 7);
            uint32_t sign = code[j] >> 3;
            float z = segment->z[start + j];
            int32_t asked = follow(rule, z, m, decision[j], sign);
            int32_t is_taken = (cell_distance(z, m, asked) <= band) & is_guided;
            num_near += (cell_distance(z, m, m + alternative_step(z, m)) <= band) & is_guided;
            asked = m + is_taken * (asked - m);
            num_changed += asked != m;
            code[j] = (uint32_t)asked | sign << 3;
        }
        for (int j = 0; j < LANES; j++) segment->code[start + j] = (uint8_t)code[j];
    }
    *in_band += num_near;
    return num_changed;
}

/* The keys of n values from element `at` of a segment on, for a search. */
static void key_values(const struct segment *segment, int at, int n, float limit, int32_t *restrict key) {
    const float *z_of = segment->z + at;
    for (int j = 0; j < n; j++) key[j] = segment->code[at + j] & 7;
    for (int j = 0; j < n; j++) key[j] = key_of_value(z_of[j], key[j], limit, j);
}

/* Decide a segment by its syndromes, which begin at bit `bit`; returns how many codes changed. */
static int64_t decide_by_syndromes(const struct code *code, const uint8_t *syndromes, int64_t bit, int block,
                                   float limit, struct segment *segment, int64_t *undecoded) {
    int32_t key[MAX_LENGTH];
    int64_t num_changed = 0;
    for (int at = 0; at < segment->n; at += (int)code->length, bit += code->num_bits) {
        int n = (int)smaller(code->length, segment->n - at), flips[MAX_FLIPS], is_known = 1;
        uint64_t difference =
            syndrome_of(code, segment->code + at, n) ^ read_bits(syndromes, bit, (int)code->num_bits);
        if (difference == 0) continue;
        for (int g = at / block; g <= (at + n - 1) / block; g++) is_known &= segment->is_finite[g];
        key_values(segment, at, n, limit, key);
        int num_flips = is_known ? cheapest_flips(code, difference, n, key, flips) : 0;
        for (int f = 0; f < num_flips; f++) {
            uint8_t *flipped = segment->code + at + flips[f];
            int32_t m = *flipped & 7;
            *flipped = (uint8_t)((m + alternative_step(segment->z[at + flips[f]], m)) | (*flipped & 8));
        }
        *undecoded += num_flips == 0;
        num_changed += num_flips;
    }
    return num_changed;
}

/* How many values of usable blocks lie within the band; without one, all of them. */
static int64_t count_near(const struct segment *segment, int block, float band) {
    int32_t num_near = 0;
    if (band == INFINITY) {
        for (int g = 0; g < segment->n / block; g++) num_near += segment->decode_scale[g] > 0.0f ? block : 0;
        return num_near;
    }
    for (int start = 0; start < segment->n; start += LANES) {
        int32_t code[LANES];
        for (int j = 0; j < LANES; j++) code[j] = segment->code[start + j] & 7;
        for (int j = 0; j < LANES; j++) {
            float z = segment->z[start + j];
            num_near += cell_distance(z, code[j], code[j] + alternative_step(z, code[j])) <= band;
        }
    }
    return num_near;
}

INLINE void write_values(enum dtype dtype, const struct segment *segment, int block, void *values, int64_t i) {
    for (int start = 0; start < segment->n; start += LANES) {
        float scale = segment->decode_scale[start / block];
        uint32_t code[LANES];
        for (int j = 0; j < LANES; j++) code[j] = segment->code[start + j];
        for (int j = 0; j < LANES; j++) {
            uint32_t bits = bits_of(code_magnitude((int32_t)(code[j] & 7)) * scale) & MAGNITUDE_BITS;
            float value = float_of(bits | (code[j] & 8) << 28);
            if (dtype == FLOAT32)
                ((float *)values)[i + start + j] = value;
            else
                ((uint16_t *)values)[i + start + j] = bf16_bits(value);
        }
    }
}

/* Decide a segment under a rule other than SYNDROMES. */
static int64_t decide_segment(enum rule rule, float band, int block, const uint8_t *decisions, struct segment *segment,
                              int64_t *in_band) {
    switch (rule) {
        case FULL: return decide(FULL, band, block, decisions, segment, in_band);
        case BRACKET: return decide(BRACKET, band, block, decisions, segment, in_band);
        case NEAREST_CELL: return decide(NEAREST_CELL, band, block, decisions, segment, in_band);
        case LOW2_BRACKET: return decide(LOW2_BRACKET, band, block, decisions, segment, in_band);
        default: return decide(LOW2_CELL, band, block, decisions, segment, in_band);
    }
}

/* Round one row by segments; returns how many codes guidance changed. */
static int64_t round_segments(const struct scheme *scheme, const void *x, enum dtype dtype, int64_t row, int64_t width,
                              struct outer outer, enum rule rule, float band, const struct code *code,
                              const uint8_t *decisions, uint8_t *block_scales, struct result result, int64_t *in_band,
                              int64_t *undecoded) {
    struct segment segment;
    int block = scheme->block, length = rule == SYNDROMES ? (int)code->length : block, common = length;
    while (common % block) common += length;
    int64_t step = SEGMENT / common * common, num_changed = 0;
    for (int64_t at = 0; at < width; at += step) {
        int64_t i = row * width + at;
        place_segment(scheme, x, dtype, i, (int)smaller(step, width - at), outer, block_scales, &segment);
        if (rule != SYNDROMES) {
            num_changed += decide_segment(rule, band, block, decisions + i, &segment, in_band);
        } else {
            *in_band += count_near(&segment, block, band);
            num_changed += decide_by_syndromes(code, decisions + row * syndrome_bytes(code, width),
                                               at / length * code->num_bits, block,
                                               band < INFINITY ? band : PLAUSIBLE_DISTANCE, &segment, undecoded);
        }
        if (dtype == FLOAT32)
            write_values(FLOAT32, &segment, block, result.values, i);
        else
            write_values(BFLOAT16, &segment, block, result.values, i);
        if (result.codes != NULL) memcpy(result.codes + i, segment.code, (size_t)segment.n);
    }
    return num_changed;
}

#endif
