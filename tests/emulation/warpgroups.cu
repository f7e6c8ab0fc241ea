/* One product of four warps, and what goes wrong with it. */

#include "warpgroups.cuh"

enum { RIGHT, NOT_SHOWN, NOT_FENCED, READ_EARLY, OPERAND_OVERWRITTEN, ROWS_OVERWRITTEN };

/* c = A B^T with A [64, 64] and B [64, 64] in bf16, row by row. */
KERNEL multiplied(const uint16_t *a, const uint4 *b, float *c, int fault) {
    DYNAMIC_SHARED(unsigned char, shared);
    shared += (0u - shared_address(shared)) % 1024;
    int thread = (int)threadIdx.x, warp = thread / WARP, g = thread % WARP / 4, j = thread % 4;
    for (int q = thread; q < 512; q += 128) copy_async(shared + q / 8 * 128 + 16 * (q % 8 ^ q / 8 % 8), b + q, 1);
    commit_copies();
    await_copies<0>();
    if (fault != NOT_SHOWN) show_copies();
    __syncthreads();
    float sum[8][4] = {};
    uint32_t of_a[4][4];
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < 4; i++) {
            int row = 16 * warp + g + 8 * (i % 2), column = 16 * t + 2 * j + 8 * (i / 2);
            of_a[t][i] = a[row * 64 + column] | (uint32_t)a[row * 64 + column + 1] << 16;
        }
    if (fault != NOT_FENCED) begin_products();
    for (int t = 0; t < 4; t++) multiply_async(sum, of_a[t], rows_of_64(shared_address(shared)) + 2 * t);
    commit_products();
    if (fault != READ_EARLY) await_products<1>(); /* which leaves it under way */
    if (fault == OPERAND_OVERWRITTEN) of_a[3][0] ^= 1;
    __syncthreads();
    if (fault == ROWS_OVERWRITTEN && thread == 0) shared[0] ^= 1;
    __syncthreads();
    if (fault != READ_EARLY) await_products<0>();
    for (int m = 0; m < 8; m++)
        for (int i = 0; i < 4; i++) c[(16 * warp + g + 8 * (i / 2)) * 64 + 8 * m + 2 * j + i % 2] = sum[m][i];
    await_products<0>();
}

/* Four 8 x 8 matrices to shared memory, transposed. */
KERNEL stored(const uint32_t *in, uint4 *out) {
    SHARED __align__(16) uint4 all[32];
    int t = (int)threadIdx.x;
    const uint32_t mine[4] = {in[t], in[32 + t], in[64 + t], in[96 + t]};
    store_matrices_transposed(all + t, mine);
    __syncwarp();
    out[t] = all[t];
}
