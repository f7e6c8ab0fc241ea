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
    int padded, in_steps; /* whether columns 16j + 2i and + 1 of a group lie at 8i + 2j and + 1, as steps of 16 take them */
    uint8_t *packed, *block_scales;
    int8_t *outer;
};

enum { SHARERS = GROUP / BLOCK /* of a group */, PAIRS = BLOCK / 2 };

/* Store a lane's block b of a row in steps, as words[8 j + i] = columns 16j + 2i and + 1 of it, together with the lanes
 * that have the other blocks of its group: in each round a lane and a neighbour give one another half of their words, until
 * each has all of 4 i in a row. The whole warp comes along; `is_there` says whether the block has a place. */
DEVICE void store_in_steps(const struct target &target, uint32_t (&words)[PAIRS], int b, bool is_there) {
    int lane = (int)threadIdx.x % SHARERS, first = 0;
#pragma unroll
    for (int by = 1, runs = 8, run = PAIRS / 8; by < SHARERS; by *= 2, runs /= 2, run *= 2) {
        bool is_upper = lane & by;
        uint32_t kept[PAIRS];
#pragma unroll
        for (int i = 0; i < runs / 2; i++)
#pragma unroll
            for (int k = 0; k < run; k++) {
                uint32_t low = run == PAIRS / 8 ? words[k * 8 + i] : words[i * run + k];
                uint32_t high = run == PAIRS / 8 ? words[k * 8 + i + runs / 2] : words[(i + runs / 2) * run + k];
                uint32_t mine = is_upper ? high : low, got = __shfl_xor_sync(FULL_MASK, is_upper ? low : high, by);
                kept[i * 2 * run + k] = is_upper ? got : mine;
                kept[i * 2 * run + run + k] = is_upper ? mine : got;
            }
#pragma unroll
        for (int w = 0; w < PAIRS; w++) words[w] = kept[w];
        first = is_upper ? first + runs / 2 : first;
    }
    if (!is_there) return;
    uint4 *to = reinterpret_cast<uint4 *>(target.values + (int64_t)blockIdx.x * target.padded) + b / SHARERS * (GROUP / 8) + first;
#pragma unroll
    for (int i = 0; i < PAIRS / 4; i++) to[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}

DEVICE void round_block(const struct values &values, const void *x, int b, int num_blocks, int exponent,
                        const struct target &target) {
    int64_t block = (int64_t)blockIdx.x * num_blocks + b;
    uint4 *to = reinterpret_cast<uint4 *>(target.values + (int64_t)blockIdx.x * target.padded) + b * (BLOCK / 8);
    uint32_t words[PAIRS] = {};
    if (b < num_blocks) {
        struct encoded encoded = encode(values, x, block, outer_of(exponent), nullptr);
#pragma unroll
        for (int w = 0; w < BLOCK / 8; w++) {
            uint4 eight = bf16_values(encoded.word[w], encoded.decode_scale);
            words[4 * w] = eight.x, words[4 * w + 1] = eight.y, words[4 * w + 2] = eight.z, words[4 * w + 3] = eight.w;
            if (!target.in_steps) to[w] = eight;
        }
        if (target.packed) store_block(encoded, block, target.block_scales, target.packed);
    }
    if (target.in_steps) store_in_steps(target, words, b, b < target.padded / BLOCK);
}

/* One row per thread block. `exponent` is the outer one, or 128 where each row finds its own. All that is held of a row is
 * under way before anything is done; what is wider is read twice. */
template <int held> DEVICE void quantize_row(const void *x, int width, int exponent, const struct target &target) {
    int num_blocks = width / BLOCK, mine = (int)threadIdx.x, step = (int)blockDim.x;
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    int end = target.in_steps ? target.padded / BLOCK : num_blocks; /* a warp stays together in steps */
    int begin = target.in_steps ? mine / WARP * WARP : mine;
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
        if (begin + p * step < end) round_block(values[p], x, mine + p * step, num_blocks, exponent, target);
    for (int b = mine + held * step; b - mine + begin < end; b += step)
        round_block(load_block(x, first + least(b, num_blocks - 1)), x, b, num_blocks, exponent, target);
    if (!target.in_steps && width + 8 * mine < target.padded) {
        int64_t at = (int64_t)blockIdx.x * target.padded + width + 8 * mine;
        *reinterpret_cast<uint4 *>(target.values + at) = make_uint4(0, 0, 0, 0);
    }
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
