/* Rows whose syndromes differ from the recorded ones, on a GPU: teams of lanes compare, look up the few flips that
 * nothing else explains, and leave what is left to a warp that searches (search.cuh). decoding.py is the definition.
 *
 * Defines: those of rows.cuh; RULE and SCALES, `enum rule` and the codings of scale_cells.h; HAS_BAND; KEYS and
 * SCALE_KEYS, ceil(length / 32) of the codes of values and scales, 1 without one. */

#ifndef TRACEFP4_FLIPS_CUH
#define TRACEFP4_FLIPS_CUH

#include "cells.h"
#include "rows.cuh"
#include "scale_cells.h"
#include "search.cuh"

constexpr enum rule FOLLOWS = (enum rule)RULE;
constexpr bool BY_SYNDROMES = FOLLOWS == SYNDROMES, SCALES_BY_SYNDROMES = SCALES == SYNDROMES_OF_SCALES;

/* What was recorded. */
struct guide {
    const uint8_t *valid;        /* NULL without a guide */
    const uint8_t *decisions;    /* a byte for every value, or the syndromes of rows */
    const int64_t *code;         /* of the syndromes */
    const void *outer;           /* of rows, where these have one */
    const uint8_t *block_scales; /* bytes, their low bits, or the syndromes of rows */
    const int64_t *scale_code;
};

/* What is written. */
struct result {
    void *outer; /* read where all rows share one */
    uint8_t *block_scales;
    void *values;
    uint8_t *codes; /* NULL: not wanted */
};

/* What is counted. */
struct tally {
    int changed, in_band, undecoded;
};

/* Shared memory: a ranking for each warp, then for every row its lowest bits and a number of each block. */
struct scratch {
    struct ranking *ranking; /* of this warp */
    uint32_t *bits, *scale_bits;
    int32_t *of_block; /* the largest magnitudes while scales are looked for, then how many values are near */
};

/* How many values of a block lie near their alternative: at most the band from it, or without a gate NEAR, which is a
 * sixteenth, in the integers of a search. Sums of these stay apart, too. */
enum { NEAR = 256, UNCOUNTED = 1 << 10, UNKNOWN = 1 << 20 /* not finite: the rollout's bits are unknown, too */ };

DEVICE struct scratch scratch_of(unsigned char *shared, int width, int slots) {
    struct scratch scratch;
    struct ranking *all = reinterpret_cast<struct ranking *>(shared);
    scratch.ranking = all + threadIdx.x / WARP;
    scratch.bits = reinterpret_cast<uint32_t *>(all + blockDim.x / WARP);
    scratch.scale_bits = scratch.bits + slots * (BY_SYNDROMES ? words_of_bits(width) : 0);
    scratch.of_block = reinterpret_cast<int32_t *>(scratch.scale_bits) +
                        slots * (SCALES_BY_SYNDROMES ? words_of_bits(width / BLOCK) : 0);
    return scratch;
}

/* One value on the grid. */
struct on_grid {
    float z;
    int32_t m;
    uint32_t sign;
};

DEVICE struct on_grid place_on_grid(uint32_t bits, float factor) {
    struct on_grid on_grid;
    uint32_t magnitude_bits = bits & MAGNITUDE_BITS;
    on_grid.sign = bits >> 31;
    if (RULES.zero != KEPT) on_grid.sign = choose(magnitude_bits == 0, RULES.zero == NEGATIVE, on_grid.sign);
    float magnitude = float_of(magnitude_bits);
    on_grid.z = multiplies((enum order)RULES.order) ? magnitude * factor : magnitude / factor;
    on_grid.z = on_grid.z < 6.0f ? on_grid.z : 6.0f;
    on_grid.m = magnitude_code(on_grid.z, (enum tie)RULES.tie);
    return on_grid;
}

/* Find the own scale bytes of the valid rows of this thread block, and flip them where their syndromes differ. */
DEVICE void recover_scales(const struct place &place, const struct guide &guide, const void *x, int num_blocks,
                           int is_valid, struct outer outer, const struct scratch &scratch, const struct result &result,
                           struct tally &tally) {
    struct code code = read_code(guide.scale_code);
    int row_bytes = (blocks_in(code, num_blocks) * code.num_bits + 7) / 8;
    for (int b = place.thread; is_valid && b < num_blocks; b += place.threads) {
        int64_t block = place.row * num_blocks + b;
        int32_t amax_bits = amax_of(load_block(x, block));
        scratch.of_block[place.slot * num_blocks + b] = amax_bits;
        result.block_scales[block] = (uint8_t)scale_byte_of(amax_bits, x, block, outer);
    }
    __syncthreads();
    put_lowest_of_scales(place, result.block_scales, num_blocks, scratch.scale_bits);
    __syncthreads();
    for_code_blocks(code, scratch.scale_bits, words_of_bits(num_blocks), place.num_slots, num_blocks,
                    [&](const struct code_block &mine) {
        uint64_t difference = 0;
        if (mine.is_there && mine.is_first_lane && guide.valid[place.first + mine.slot])
            difference = mine.syndrome ^ read_bits(guide.block_scales + (place.first + mine.slot) * row_bytes,
                                                   (int64_t)mine.index * code.num_bits, code.num_bits);
        for_differing(mine, difference, [&](const struct code_block &block, uint64_t difference) {
            int64_t row = place.first + block.slot, first = row * num_blocks + block.at;
            const int32_t *amax_bits = scratch.of_block + block.slot * num_blocks + block.at;
            struct outer scale = read_outer(&RULES, result.outer, PER_ROW ? row : 0);
            int32_t key[SCALE_KEYS];
            uint32_t other[SCALE_KEYS];
            for (int i = 0; i < SCALE_KEYS; i++) {
                int g = (int)threadIdx.x % WARP + i * WARP;
                key[i] = NO_CANDIDATE;
                if (g >= block.n) continue;
                uint32_t own = result.block_scales[first + g];
                float target;
                targets_of_maxima(&RULES, 1, amax_bits + g, scale, &own, &target);
                key_scales(1, amax_bits + g, &own, &target, g, key + i, other + i);
            }
            struct flips flips = cheapest_flips(code, difference, key, scratch.ranking);
            for (int f = 0; f < flips.num; f++) {
                int g = scratch.ranking->key[rank_at(flips, f)] & ((1 << INDEX_BITS) - 1);
                for (int i = 0; i < SCALE_KEYS; i++)
                    if (g == (int)threadIdx.x % WARP + i * WARP) result.block_scales[first + g] = (uint8_t)other[i];
            }
            tally.undecoded += flips.num == 0 && threadIdx.x % WARP == 0;
        });
    });
    __syncthreads();
}

/* A value as a search for flips sees it. */
struct candidate {
    int32_t key;
    float decode_scale;
    uint32_t flipped; /* the code that it would have */
};

/* The value of index j in a block of a code. */
DEVICE struct candidate candidate_at(const struct place &place, const struct code_block &block, int j, const void *x,
                                     int width, float limit, const struct result &result) {
    int64_t row = place.first + block.slot, at = row * width + block.at + j;
    struct outer scale = read_outer(&RULES, result.outer, PER_ROW ? row : 0);
    uint32_t byte = result.block_scales[at / BLOCK];
    struct candidate found;
    float unit, factor;
    decode_bytes(&RULES, 1, &byte, scale, &unit, &found.decode_scale, &factor);
    struct on_grid on_grid = place_on_grid(load_bits(x, INPUT, at), factor);
    found.flipped = (uint32_t)(on_grid.m + alternative_step(on_grid.z, on_grid.m)) | on_grid.sign << 3;
    found.key = found.decode_scale > 0.0f ? key_of_value(on_grid.z, on_grid.m, limit, j) : NO_CANDIDATE;
    return found;
}

/* Flip that value. */
DEVICE void put_flipped(const struct place &place, const struct code_block &block, int j, int width,
                        const struct candidate &candidate, const struct result &result) {
    int64_t at = (place.first + block.slot) * width + block.at + j;
    float value = value_of_code(candidate.flipped, candidate.decode_scale);
    if (INPUT == FLOAT32)
        static_cast<float *>(result.values)[at] = value;
    else
        static_cast<uint16_t *>(result.values)[at] = bf16_bits(value);
    if (result.codes) result.codes[at] = (uint8_t)candidate.flipped;
}

/* Flip the few values of a block that nothing else explains, if they are candidates and so few are near that all
 * of these are ranked; by the team of the block. Returns the difference that is left to search for. */
DEVICE uint64_t flip_alone(const struct code &code, const struct place &place, const struct code_block &block,
                           uint64_t difference, const void *x, int width, float limit, const struct scratch &scratch,
                           const struct result &result, struct tally &tally) {
    int at, num = flips_alone(code, block.team, difference, &at), lane = (int)threadIdx.x % block.team, near = 0;
    const int32_t *of_row = scratch.of_block + block.slot * (width / BLOCK);
    for (int g = block.at / BLOCK + lane; num > 0 && g * BLOCK < block.at + block.n; g += block.team) near += of_row[g];
    struct candidate candidate = {NO_CANDIDATE, 0.0f, 0};
    if (lane < num && at < block.n) candidate = candidate_at(place, block, at, x, width, limit, result);
    if (lane < num && !HAS_BAND && candidate.key >> INDEX_BITS >= NEAR) near = UNCOUNTED;
    if (lane < num && candidate.key == NO_CANDIDATE) near = UNKNOWN;
    for (int with = block.team / 2; with; with /= 2) near += __shfl_xor_sync(FULL_MASK, near, with);
    if (num == 0) return difference;
    if (num == NOTHING_EXPLAINS || near >= UNKNOWN) {
        tally.undecoded += block.is_first_lane;
        return 0;
    }
    if (near > code.num_candidates) return difference;
    if (lane < num) put_flipped(place, block, at, width, candidate, result);
    tally.changed += lane < num;
    return 0;
}

/* Flip values of a block by a search of the whole warp. */
DEVICE void flip_searched(const struct code &code, const struct place &place, const struct code_block &block,
                          uint64_t difference, const void *x, int width, float limit, const struct scratch &scratch,
                          const struct result &result, struct tally &tally) {
    int lane = (int)threadIdx.x % WARP, is_known = 1;
    int32_t key[KEYS];
    for (int i = 0; i < KEYS; i++) {
        int j = lane + i * WARP;
        key[i] = NO_CANDIDATE;
        if (j >= block.n) continue;
        is_known &= scratch.of_block[block.slot * (width / BLOCK) + (block.at + j) / BLOCK] < UNKNOWN;
        key[i] = candidate_at(place, block, j, x, width, limit, result).key;
    }
    struct flips flips = {0, NEVER, 0};
    if (__all_sync(FULL_MASK, is_known)) flips = cheapest_flips(code, difference, key, scratch.ranking);
    for (int f = 0; f < flips.num; f++) {
        int j = scratch.ranking->key[rank_at(flips, f)] & INDEX_MASK;
        if (j % WARP == lane)
            put_flipped(place, block, j, width, candidate_at(place, block, j, x, width, limit, result), result);
    }
    tally.changed += lane == 0 ? flips.num : 0;
    tally.undecoded += flips.num == 0 && lane == 0;
}

/* Flip values of the valid rows of this thread block where their syndromes differ from the recorded ones. */
DEVICE void flip_values(const struct place &place, const struct guide &guide, const void *x, int width, float limit,
                        const struct scratch &scratch, const struct result &result, struct tally &tally) {
    struct code code = read_code(guide.code);
    int row_bytes = (blocks_in(code, width) * code.num_bits + 7) / 8;
    __syncthreads();
    for_code_blocks(code, scratch.bits, words_of_bits(width), place.num_slots, width,
                    [&](const struct code_block &mine) {
        uint64_t difference = 0;
        if (mine.is_there && guide.valid[place.first + mine.slot])
            difference = mine.syndrome ^ read_bits(guide.decisions + (place.first + mine.slot) * row_bytes,
                                                   (int64_t)mine.index * code.num_bits, code.num_bits);
        difference = flip_alone(code, place, mine, difference, x, width, limit, scratch, result, tally);
        for_differing(mine, mine.is_first_lane ? difference : 0, [&](const struct code_block &block, uint64_t left) {
            flip_searched(code, place, block, left, x, width, limit, scratch, result, tally);
        });
    });
}

#endif
