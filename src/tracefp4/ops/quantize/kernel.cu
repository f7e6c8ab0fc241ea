/* quantize on a GPU: a thread takes a block of the scheme, and where the outer scale of a row has to be found, a thread
 * block takes a row. A block is rounded by blocks.cuh.
 *
 * Defines: SCHEME, the numbers of ops/rules.py; DTYPE, `enum dtype`. */

#include "blocks.cuh"

enum { HELD = INPUT == FLOAT32 ? 2 : 4 /* blocks of a thread that stay in registers, where rows are many */ };

/* One row per thread block: find its outer scale, write it, encode the row. All that is held of it is under way before
 * anything is done; what is wider is read twice. */
template <int held> DEVICE void quantize_row(const void *x, int width, void *outer, uint8_t *block_scales, uint8_t *packed) {
    int num_blocks = width / BLOCK, mine = (int)threadIdx.x, step = (int)blockDim.x;
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    struct values values[held];
    int32_t largest = 0;
#pragma unroll
    for (int p = 0; p < held; p++)
        if (mine + p * step < num_blocks) values[p] = load_block(x, first + mine + p * step);
#pragma unroll
    for (int p = 0; p < held; p++)
        if (mine + p * step < num_blocks) largest = most(largest, finite_amax(values[p]));
    for (int b = mine + held * step; b < num_blocks; b += step)
        largest = most(largest, finite_amax(load_block(x, first + b)));
    float amax = float_of((uint32_t)most_of_block(largest));
    if (mine == 0) write_outer(&RULES, amax, outer, blockIdx.x);
    struct outer scale = outer_of_amax(amax);
#pragma unroll
    for (int p = 0; p < held; p++) {
        int b = mine + p * step;
        if (b < num_blocks) store_block(encode(values[p], x, first + b, scale, nullptr), first + b, block_scales, packed);
    }
    for (int b = mine + held * step; b < num_blocks; b += step)
        store_block(encode(load_block(x, first + b), x, first + b, scale, nullptr), first + b, block_scales, packed);
}

KERNEL quantize_few(const void *x, int width, void *outer, uint8_t *block_scales, uint8_t *packed) {
    await_earlier();
    quantize_row<1>(x, width, outer, block_scales, packed);
}

KERNEL quantize_many(const void *x, int width, void *outer, uint8_t *block_scales, uint8_t *packed) {
    await_earlier();
    quantize_row<HELD>(x, width, outer, block_scales, packed);
}

/* Outer scales are given, one for `blocks_per_outer` blocks; a thread per block. */
KERNEL quantize_blocks(const void *x, int num_blocks, int blocks_per_outer, const void *outer, int has_scales,
                       uint8_t *block_scales, uint8_t *packed) {
    await_earlier();
    int64_t block = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= num_blocks) return;
    struct outer scale = read_outer(&RULES, outer, (uint32_t)block / (uint32_t)blocks_per_outer);
    store_block(encode(load_block(x, block), x, block, scale, has_scales ? block_scales : nullptr), block, block_scales,
                packed);
}

/* The largest magnitude of each row, among its finite blocks of 16. */
KERNEL row_maxima(const void *x, int width, float *amax) {
    await_earlier();
    float largest = row_maximum(x, blockIdx.x, width);
    if (threadIdx.x == 0) amax[blockIdx.x] = largest;
}
