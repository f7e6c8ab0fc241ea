/* What the expert layer quantizes: activations row by row, as the values that products read (and, where they are asked for,
 * the bytes that a record keeps), and bf16 weights straight into fragment order (formats/weight_fragments.py).
 *
 * Defines: those of blocks.cuh; DTYPE is bf16, and the scheme's values are bf16 numbers. */

#include "blocks.cuh"
#include "decoding.cuh"

enum { GROUP = 64, TILE_ROWS = 16 };

DEVICE struct outer outer_of(int exponent) {
    struct outer outer = {power_of_two(exponent), power_of_two(exponent), power_of_two(-exponent)};
    return outer;
}

enum { HELD = 4 /* blocks of a thread that stay in registers, where rows are many */ };

/* Where a row goes: values [.., padded], zeros beyond the width; packed, block_scales and outer may be null, all or none. */
struct target {
    uint16_t *values;
    int padded, in_steps; /* whether columns lie in the order in which steps of 16 add them up */
    uint8_t *packed, *block_scales;
    int8_t *outer;
};

/* Eight values of a row, columns 8 e on. In steps, columns 16j + 2i and + 1 of a group lie at 8i + 2j and + 1. */
DEVICE void store_eight(const struct target &target, int e, const uint4 &eight) {
    uint16_t *row = target.values + (int64_t)blockIdx.x * target.padded;
    if (!target.in_steps) {
        *reinterpret_cast<uint4 *>(row + 8 * e) = eight;
        return;
    }
    uint32_t *to = reinterpret_cast<uint32_t *>(row) + e / 8 * (GROUP / 2) + e % 2 * 16 + e / 2 % 4;
    to[0] = eight.x;
    to[4] = eight.y;
    to[8] = eight.z;
    to[12] = eight.w;
}

DEVICE void round_block(const struct values &values, const void *x, int b, int num_blocks, int exponent,
                        const struct target &target) {
    int64_t block = (int64_t)blockIdx.x * num_blocks + b;
    struct encoded encoded = encode(values, x, block, outer_of(exponent), nullptr);
    for (int w = 0; w < BLOCK / 8; w++)
        store_eight(target, b * (BLOCK / 8) + w, bf16_values(encoded.word[w], encoded.decode_scale));
    if (target.packed) store_block(encoded, block, target.block_scales, target.packed);
}

/* One row per thread block. `exponent` is the outer one, or 128 where each row finds its own. All that is held of a row is
 * under way before anything is done; what is wider is read twice. */
template <int held> DEVICE void quantize_row(const void *x, int width, int exponent, const struct target &target) {
    int num_blocks = width / BLOCK, mine = (int)threadIdx.x, step = (int)blockDim.x;
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    struct values values[held];
#pragma unroll
    for (int p = 0; p < held; p++)
        if (mine + p * step < num_blocks) values[p] = load_block(x, first + mine + p * step);
    if (exponent == 128) {
        int32_t largest = 0;
#pragma unroll
        for (int p = 0; p < held; p++)
            if (mine + p * step < num_blocks) largest = most(largest, finite_amax(values[p]));
        for (int b = mine + held * step; b < num_blocks; b += step)
            largest = most(largest, finite_amax(load_block(x, first + b)));
        exponent = pow2_exponent(most_of_block(largest), (float)RULES.limit);
        if (target.outer && mine == 0) target.outer[blockIdx.x] = (int8_t)exponent;
    }
#pragma unroll
    for (int p = 0; p < held; p++)
        if (mine + p * step < num_blocks) round_block(values[p], x, mine + p * step, num_blocks, exponent, target);
    for (int b = mine + held * step; b < num_blocks; b += step)
        round_block(load_block(x, first + b), x, b, num_blocks, exponent, target);
    if (width + 8 * mine < target.padded) store_eight(target, width / 8 + mine, make_uint4(0, 0, 0, 0));
}

KERNEL quantize_few_rows(const void *x, int width, int padded, int in_steps, int exponent, uint16_t *values, uint8_t *packed,
                         uint8_t *block_scales, int8_t *outer) {
    await_earlier();
    quantize_row<1>(x, width, exponent, {values, padded, in_steps, packed, block_scales, outer});
}

KERNEL quantize_many_rows(const void *x, int width, int padded, int in_steps, int exponent, uint16_t *values, uint8_t *packed,
                         uint8_t *block_scales, int8_t *outer) {
    await_earlier();
    quantize_row<HELD>(x, width, exponent, {values, padded, in_steps, packed, block_scales, outer});
}

/* The largest magnitudes of finite blocks in the parts of every matrix: partial[matrix][part], a thread block each. */
KERNEL matrix_maxima(const void *w, int num_blocks, float *partial) {
    await_earlier();
    int64_t first = (int64_t)blockIdx.y * num_blocks;
    int32_t largest = 0;
    for (int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; b < num_blocks; b += (int64_t)gridDim.x * blockDim.x)
        largest = most(largest, finite_amax(load_block(w, first + b)));
    largest = most_of_block(largest);
    if (threadIdx.x == 0) partial[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = float_of((uint32_t)largest);
}

/* Four codes of a row as they lie in a fragment's word, nibbles 0, 16, 8 and 24 bits up. */
DEVICE uint32_t spread(uint32_t four) {
    return (four & 0xF) | (four & 0xF0) << 12 | (four & 0xF00) | (four & 0xF000) << 12;
}

/* Quantize matrices [.., num_rows, width] into fragments; blockIdx.y is the matrix. A thread has a block of rows g and
 * g + 8 of a tile. Exponents are found from the maxima, num_partial of each matrix; where that is 0, they are read. */
KERNEL refit_matrices(const void *w, int num_rows, int width, const float *partial, int num_partial, int8_t *exponents,
                      uint4 *words, uint8_t *scales) {
    await_earlier();
    enum { PER_GROUP = GROUP / BLOCK };
    int64_t matrix = blockIdx.y;
    int exponent = num_partial ? 0 : exponents[matrix];
    if (num_partial) {
        int32_t largest = 0;
        for (int i = (int)threadIdx.x; i < num_partial; i += (int)blockDim.x)
            largest = most(largest, (int32_t)bits_of(partial[matrix * num_partial + i]));
        exponent = pow2_exponent(most_of_block(largest), (float)RULES.limit);
        if (blockIdx.x == 0 && threadIdx.x == 0) exponents[matrix] = (int8_t)exponent;
    }
    int groups = (width + GROUP - 1) / GROUP, num_tiles = num_rows / TILE_ROWS;
    int item = (int)(blockIdx.x * blockDim.x + threadIdx.x), in_matrix = item / (8 * PER_GROUP);
    int g = item / PER_GROUP % 8, b = item % PER_GROUP;
    if (in_matrix >= num_tiles * groups) return;
    int row = in_matrix / groups * TILE_ROWS + g, block = in_matrix % groups * PER_GROUP + b;
    struct encoded rows[2];
    for (int h = 0; h < 2; h++) {
        if (block < width / BLOCK) {
            int64_t i = (matrix * num_rows + row + 8 * h) * (width / BLOCK) + block;
            rows[h] = encode(load_block(w, i), w, i, outer_of(exponent), nullptr);
        } else {
            for (int n = 0; n < BLOCK / 8; n++) rows[h].word[n] = 0;
            rows[h].byte = 0;
        }
    }
    int64_t at = matrix * num_tiles * groups + in_matrix;
    for (int n = 0; n < BLOCK / 16; n++) {
        uint32_t word[4];
        for (int t = 0; t < 4; t++) {
            int half = 2 * n + t / 2, up = 16 * (t % 2);
            word[t] = spread(rows[0].word[half] >> up & 0xFFFF) | spread(rows[1].word[half] >> up & 0xFFFF) << 4;
        }
        words[at * 32 + 4 * g + b * (BLOCK / 16) + n] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    uint8_t *to = scales + (at * 8 + g) * (2 * PER_GROUP) + 2 * b;
    to[0] = (uint8_t)rows[0].byte;
    to[1] = (uint8_t)rows[1].byte;
}
