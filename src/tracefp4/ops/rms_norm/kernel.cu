/* RMS norm of a row per thread block, of a sum of two rows if there are two, and rounding of the result to FP4. The row is
 * read once and stays in registers.
 *
 * Defines: those of bf16_rows.cuh; DTYPE is bf16. */

#include "bf16_rows.cuh"
#include "norms.cuh"

/* The sum of one number per thread, in all of them. */
DEVICE double sum_of_block(double mine) {
    SHARED double of_warp[32];
    mine = sum_of_team(mine, WARP);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = mine;
    __syncthreads();
    mine = 0.0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) mine += of_warp[w];
    return mine;
}

/* `residual` and `sums` may both be null, and so may `outer`, `block_scales` and `packed`. */
KERNEL __launch_bounds__(512) normalize_rows(const void *x, const void *residual, const void *weight, int width,
                                             float epsilon, void *sums, void *out, void *outer, uint8_t *block_scales,
                                             uint8_t *packed) {
    int num_blocks = num_blocks_of(width);
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    struct row row;
    double squares = 0.0;
    for (int p = 0; p < PARTS; p++) {
        if (block_of(p) >= num_blocks) continue;
        struct values &part = row.part[p];
        part = load_block(x, first + block_of(p));
        if (residual) {
            struct values other = load_block(residual, first + block_of(p));
            for (int w = 0; w < WORDS; w++)
                part.word[w] = bf16x2_of(low_bf16(part.word[w]) + low_bf16(other.word[w]),
                                         high_bf16(part.word[w]) + high_bf16(other.word[w]));
            store_values(part, sums, first + block_of(p));
        }
        for (int w = 0; w < WORDS; w++) squares += squares_of(part.word[w]);
    }
    float factor = norm_factor(sum_of_block(squares), width, epsilon);
    for (int p = 0; p < PARTS; p++) {
        if (block_of(p) >= num_blocks) continue;
        struct values of_weight = load_shared_block(weight, block_of(p));
        for (int w = 0; w < WORDS; w++) row.part[p].word[w] = normed(row.part[p].word[w], factor, of_weight.word[w]);
        store_values(row.part[p], out, first + block_of(p));
    }
    if (packed) quantize_row(row, width, out, outer, block_scales, packed);
}
