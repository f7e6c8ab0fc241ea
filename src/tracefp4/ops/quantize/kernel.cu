/* quantize on a GPU: a thread takes a block of the scheme, and where the outer scale of a row has to be found, a thread
 * block takes a row. A block is rounded by blocks.cuh.
 *
 * Defines: SCHEME, the numbers of ops/rules.py; DTYPE, `enum dtype`. */

#include "blocks.cuh"

/* One row per thread block: find its outer scale, write it, encode the row. */
KERNEL quantize_row(const void *x, int width, void *outer, uint8_t *block_scales, uint8_t *packed) {
    int num_blocks = width / BLOCK, mine = (int)threadIdx.x;
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    struct values values; /* the first block of this thread stays in registers: rows of usual width are read once */
    int32_t largest = 0;
    if (mine < num_blocks) {
        values = load_block(x, first + mine);
        largest = finite_amax(values);
    }
    for (int b = mine + (int)blockDim.x; b < num_blocks; b += (int)blockDim.x)
        largest = most(largest, finite_amax(load_block(x, first + b)));
    float amax = float_of((uint32_t)most_of_block(largest));
    if (threadIdx.x == 0) write_outer(&RULES, amax, outer, blockIdx.x);
    __syncthreads();
    struct outer scale = read_outer(&RULES, outer, blockIdx.x);
    for (int b = mine; b < num_blocks; b += (int)blockDim.x) {
        if (b != mine) values = load_block(x, first + b);
        store_block(encode(values, x, first + b, scale, nullptr), first + b, block_scales, packed);
    }
}

/* Outer scales are given, one for `rows_per_outer` rows; a thread per block. */
KERNEL quantize_blocks(const void *x, int num_rows, int width, int rows_per_outer, const void *outer, int has_scales,
                       uint8_t *block_scales, uint8_t *packed) {
    int64_t block = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = block / (width / BLOCK);
    if (row >= num_rows) return;
    struct outer scale = read_outer(&RULES, outer, row / rows_per_outer);
    store_block(encode(load_block(x, block), x, block, scale, has_scales ? block_scales : nullptr), block, block_scales,
                packed);
}

/* The largest magnitude of each row, among its finite blocks of 16. */
KERNEL row_maxima(const void *x, int width, float *amax) {
    float largest = row_maximum(x, blockIdx.x, width);
    if (threadIdx.x == 0) amax[blockIdx.x] = largest;
}
