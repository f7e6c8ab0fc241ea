/* A row of bf16 in the registers of a thread block, for kernels that compute it and may quantize it: thread t holds blocks
 * t, t + threads, ... of the scheme. Same bytes as quantize.
 *
 * Defines: those of blocks.cuh; OUTER_OF_ROW, 1 where each row finds its own outer scale; PARTS, blocks of a thread. */

#ifndef TRACEFP4_BF16_ROWS_CUH
#define TRACEFP4_BF16_ROWS_CUH

#include "blocks.cuh"

struct row {
    struct values part[PARTS];
};

DEVICE int num_blocks_of(int width) { return width / BLOCK; }

/* The block that this thread holds as part p. */
DEVICE int block_of(int p) { return (int)threadIdx.x + p * (int)blockDim.x; }

/* A block of something that all rows read: it should stay in the caches. */
DEVICE struct values load_shared_block(const void *x, int64_t block) {
    struct values values;
    const uint4 *at = static_cast<const uint4 *>(x) + block * (WORDS / 4);
    for (int q = 0; q < WORDS / 4; q++) {
        uint4 four = at[q];
        values.word[4 * q] = four.x;
        values.word[4 * q + 1] = four.y;
        values.word[4 * q + 2] = four.z;
        values.word[4 * q + 3] = four.w;
    }
    return values;
}

DEVICE void store_values(const struct values &values, void *x, int64_t block) {
    uint4 *to = static_cast<uint4 *>(x) + block * (WORDS / 4);
    for (int q = 0; q < WORDS / 4; q++)
        to[q] = make_uint4(values.word[4 * q], values.word[4 * q + 1], values.word[4 * q + 2], values.word[4 * q + 3]);
}

/* Quantize the row of this thread block. `stored` holds its values, written by the threads that hold them. */
DEVICE void quantize_row(const struct row &row, int width, const void *stored, void *outer, uint8_t *block_scales,
                         uint8_t *packed) {
    int num_blocks = num_blocks_of(width);
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    if (OUTER_OF_ROW) {
        int32_t largest = 0;
        for (int p = 0; p < PARTS; p++)
            if (block_of(p) < num_blocks) largest = most(largest, finite_amax(row.part[p]));
        float amax = float_of((uint32_t)most_of_block(largest));
        if (threadIdx.x == 0) write_outer(&RULES, amax, outer, blockIdx.x);
        __syncthreads();
    }
    struct outer scale = read_outer(&RULES, outer, OUTER_OF_ROW ? blockIdx.x : 0);
    for (int p = 0; p < PARTS; p++)
        if (block_of(p) < num_blocks) {
            int64_t at = first + block_of(p);
            store_block(encode(row.part[p], stored, at, scale, nullptr), at, block_scales, packed);
        }
}

#endif
