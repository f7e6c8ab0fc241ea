/* Scale bytes from their recorded low bits; scale_decoding.py is the definition.
 *
 * A row's bytes are found before its elements are rounded, in a sweep for the block maxima of its own. */

#ifndef TRACEFP4_RECOVERY_H
#define TRACEFP4_RECOVERY_H

#include "scale_cells.h"
#include "search.h"

/* The bytes of one block of scales, `n` of them from element i on; returns whether nothing explains its syndrome. */
static int scales_of_syndrome(const struct scheme *scheme, const void *x, enum dtype dtype, int64_t i, int n,
                              struct outer outer, const struct code *code, uint64_t recorded, uint8_t *block_scales) {
    int32_t amax_bits[MAX_LENGTH], key[MAX_LENGTH];
    uint32_t own[MAX_LENGTH], other[MAX_LENGTH];
    float target[BLOCKS];
    for (int g = 0, num; g < n; g += num) {
        struct strip strip;
        read_strip(scheme, x, dtype, i + 16 * g, 16 * (int64_t)(n - g), &strip);
        num = strip.num_blocks;
        bytes_of_maxima(scheme, num, strip.amax_bits, outer, 1.0f, own + g);
        memcpy(amax_bits + g, strip.amax_bits, (size_t)num * sizeof *amax_bits);
        for (int h = g; h < g + num; h++) block_scales[h] = (uint8_t)own[h];
    }
    uint64_t difference = syndrome_of(code, block_scales, n) ^ recorded;
    if (difference == 0) return 0;
    for (int g = 0; g < n; g += BLOCKS) {
        int num = least(BLOCKS, n - g);
        targets_of_maxima(scheme, num, amax_bits + g, outer, own + g, target);
        key_scales(num, amax_bits + g, own + g, target, g, key + g, other + g);
    }
    int flips[MAX_FLIPS], num_flips = cheapest_flips(code, difference, n, key, flips);
    for (int f = 0; f < num_flips; f++) block_scales[flips[f]] = (uint8_t)other[flips[f]];
    return num_flips == 0;
}

/* Write the scale bytes of the row that begins at element `start`; returns how many blocks of syndromes nothing
 * explains. coding: SYNDROMES_OF_SCALES under `code`, or the step of a coset. */
static int recover_scales(const struct scheme *scheme, const void *x, enum dtype dtype, int64_t start, int64_t width,
                          struct outer outer, int coding, const struct code *code, const uint8_t *recorded,
                          uint8_t *block_scales) {
    int undecoded = 0;
    int64_t num_blocks = width / scheme->block;
    if (coding == SYNDROMES_OF_SCALES) {
        for (int64_t g = 0, bit = 0; g < num_blocks; g += code->length, bit += code->num_bits)
            undecoded += scales_of_syndrome(scheme, x, dtype, start + g * 16,
                                            (int)smaller(code->length, num_blocks - g), outer, code,
                                            read_bits(recorded, bit, (int)code->num_bits), block_scales + g);
        return undecoded;
    }
    for (int64_t i = 0; i < width; i += STRIP) {
        struct strip strip;
        read_strip(scheme, x, dtype, start + i, width - i, &strip);
        cosets_of_strip(scheme, &strip, outer, coding, recorded + i / scheme->block, block_scales + i / scheme->block);
    }
    return 0;
}

#endif
