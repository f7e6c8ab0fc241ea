/* RMS norm of a row per thread block, of a sum of two rows if there are two, and rounding of the result to FP4. The row is
 * read once and stays in registers.
 *
 * Defines: those of bf16_rows.cuh; DTYPE is bf16. */

#include "bf16_rows.cuh"
#include "norms.cuh"

/* R(a + b) of pairs of bf16. */
DEVICE uint32_t sum_of_pairs(uint32_t a, uint32_t b) {
    return bf16x2_of(low_bf16(a) + low_bf16(b), high_bf16(a) + high_bf16(b));
}

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

/* R(weight * (x * factor)) of eight under float32 weights, which lie in the caches. */
DEVICE void norm_once(struct eight &part, float factor, const void *weight, int eight) {
    const float2 *pairs = static_cast<const float2 *>(weight) + eight * 4;
    for (int w = 0; w < 4; w++) part.word[w] = normed_once(part.word[w], factor, pairs[w]);
}

/* `residual` and `sums` may both be null, and so may `outer`, `block_scales` and `packed`. The weight is float32 where
 * `is_wide`. All that is read of rows is under way before anything is computed. */
KERNEL __launch_bounds__(512) normalize_rows(const void *x, const void *residual, const void *weight, int is_wide,
                                             int width, float epsilon, void *sums, void *out, void *outer,
                                             uint8_t *block_scales, uint8_t *packed) {
    await_earlier();
    int num_eights = num_eights_of(width);
    int64_t first = (int64_t)blockIdx.x * num_eights;
    struct row row, other, of_weight;
    double squares = 0.0;
    for (int p = 0; p < PARTS; p++) {
        if (eight_of(p) >= num_eights) continue;
        row.part[p] = load_eight(x, first + eight_of(p));
        if (residual) other.part[p] = load_eight(residual, first + eight_of(p));
        if (PARTS <= 2 && !is_wide) of_weight.part[p] = load_shared_eight(weight, eight_of(p)); /* more would not fit */
    }
    for (int p = 0; p < PARTS; p++) {
        if (eight_of(p) >= num_eights) continue;
        struct eight &part = row.part[p];
        if (residual) {
            for (int w = 0; w < 4; w++) part.word[w] = sum_of_pairs(part.word[w], other.part[p].word[w]);
            store_eight(part, sums, first + eight_of(p));
        }
        for (int w = 0; w < 4; w++) squares += squares_of(part.word[w]);
    }
    float factor = norm_factor(sum_of_block(squares), width, epsilon);
    for (int p = 0; p < PARTS; p++) {
        if (eight_of(p) >= num_eights) continue;
        if (is_wide) {
            norm_once(row.part[p], factor, weight, eight_of(p));
        } else {
            if (PARTS > 2) of_weight.part[p] = load_shared_eight(weight, eight_of(p));
            for (int w = 0; w < 4; w++)
                row.part[p].word[w] = normed(row.part[p].word[w], factor, of_weight.part[p].word[w]);
        }
        store_eight(row.part[p], out, first + eight_of(p));
    }
    if (packed) quantize_row(row, width, out, outer, block_scales, packed);
}
