/* The sums of a split: what warps have of them, and how they are merged in their order, then folded into the totals of a
 * block or stored for `combine`.
 *
 * Defines: those of kernel.cu. */

#ifndef TRACEFP4_KV_SPLITS_CUH
#define TRACEFP4_KV_SPLITS_CUH

#include "pages.cuh"

enum {
    COLUMNS = 8 * NT,
    THREADS = WARPS * WARP,
    SPLIT_TILES = SPLIT / TILE,
    SHARE = SPLIT_TILES / WARPS, /* of a warp in a split */
    MERGED_DIMS = IS_FP4 ? 64 : HEAD_DIM / 4, /* whose sums the warps exchange at a time */
    MERGED_BLOCKS = MERGED_DIMS / 16,
    MERGED_STRIDE = MERGED_DIMS + 4, /* between columns: lanes of a warp write to different banks */
    LIFT = IS_FP4 ? 15 : 0 /* probabilities are multiplied by 2^LIFT: fp16 then holds them down to 2^-39 */
};
static_assert(SPLIT_TILES % WARPS == 0, "every warp has the same share of a split, and none of two at a time");
static_assert(SHARE <= WARP, "a lane looks up one tile of a split");
#define LOWEST (-0x1p127f) /* m before any token */

/* What one launch is about. */
struct problem {
    const void *queries;
    const int64_t *table, *positions;
    void *out;
    float *partial, *partial_sums; /* [sequences, kv heads, splits, columns] of HEAD_DIM, and of (m, l); or null */
    int num_queries, group, num_kv, num_pages, num_splits, num_columns;
};

/* Sums of a warp over its tiles of a split: o of dim 16 k + g + 8 (c / 2) and column 8 n + 2 j + c % 2, without 2^m. */
struct sums {
    float o[NT][BLOCKS][4];
    float m[NT][2], l[NT][2];
};

/* What all warps share. */
struct merged {
    float part[WARPS][COLUMNS][MERGED_STRIDE], total[COLUMNS][HEAD_DIM];
    float m_of_warp[WARPS][COLUMNS], l_of_warp[WARPS][COLUMNS], factor_of_warp[WARPS][COLUMNS];
    float m[COLUMNS], l[COLUMNS], total_m[COLUMNS], total_l[COLUMNS];
    float factor_of_split[COLUMNS], factor_of_total[COLUMNS];
    int num_visible[COLUMNS];
};

/* 2^d for an integer d <= 0; 0 below 2^-126 and for NaN. */
DEVICE float power_below_one(float d) { return float_of((uint32_t)((int)fmaxf(d, -127.0f) + 127) << 23); }

/* The sum of a total and the next split, each without its 2^m. */
DEVICE float folded(float total, float m_total, float part, float m_part) {
    float m = fmaxf(m_total, m_part);
    return total * power_below_one(m_total - m) + part * power_below_one(m_part - m);
}

/* Merge the warps' m and l of a split, and fold them into the totals of the columns that see some of it. */
DEVICE void merge_columns(struct merged &merged, struct sums &sums, int split) {
    int thread = (int)threadIdx.x, lane = thread % WARP, warp = thread / WARP, j = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int with = 4; with < WARP; with *= 2)
                sums.l[n][i] += __shfl_xor_sync(FULL_MASK, sums.l[n][i], with);
            if (lane / 4) continue;
            merged.m_of_warp[warp][8 * n + 2 * j + i] = sums.m[n][i];
            merged.l_of_warp[warp][8 * n + 2 * j + i] = sums.l[n][i];
        }
    __syncthreads();
    if (thread >= COLUMNS) return;
    float m = LOWEST, l = 0.0f, total_m = merged.total_m[thread];
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, merged.m_of_warp[w][thread]);
    for (int w = 0; w < WARPS; w++) {
        float factor = power_below_one(merged.m_of_warp[w][thread] - m);
        l += merged.l_of_warp[w][thread] * factor;
        merged.factor_of_warp[w][thread] = factor;
    }
    merged.m[thread] = m;
    merged.l[thread] = l;
    if (merged.num_visible[thread] <= split * SPLIT) return;
    merged.factor_of_total[thread] = power_below_one(total_m - fmaxf(total_m, m));
    merged.factor_of_split[thread] = power_below_one(m - fmaxf(total_m, m));
    merged.total_l[thread] = folded(merged.total_l[thread], total_m, l, m);
    merged.total_m[thread] = fmaxf(total_m, m);
}

/* Add up what the warps have written to `part`, in their order: four dims of a column from `at` on. */
DEVICE float4 sum_of_warps(const struct merged &merged, int column, int at) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float4 part = *reinterpret_cast<const float4 *>(merged.part[w][column] + at);
        float factor = merged.factor_of_warp[w][column];
        sum = make_float4(sum.x + part.x * factor, sum.y + part.y * factor, sum.z + part.z * factor,
                          sum.w + part.w * factor);
    }
    return sum;
}

/* Fold four dims of a split's sums into the totals, unless the column sees nothing of the split. */
DEVICE void fold_split(struct merged &merged, int split, int column, int d, float4 o) {
    if (merged.num_visible[column] <= split * SPLIT) return;
    float4 *to = reinterpret_cast<float4 *>(merged.total[column] + d);
    float4 total = split ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float a = merged.factor_of_total[column], b = merged.factor_of_split[column];
    *to = make_float4(total.x * a + o.x * b, total.y * a + o.y * b, total.z * a + o.z * b, total.w * a + o.w * b);
}

/* Store four dims of a split's sums for `combine`, with the first its m and l. */
DEVICE void store_partial(const struct problem &problem, const struct merged &merged, int64_t split, int first,
                          int column, int d, float4 o) {
    if (first + column >= problem.num_columns) return;
    int64_t at = split * problem.num_columns + first + column;
    *reinterpret_cast<float4 *>(problem.partial + at * HEAD_DIM + d) = o;
    if (d) return;
    problem.partial_sums[2 * at] = merged.m[column];
    problem.partial_sums[2 * at + 1] = merged.l[column];
}

/* Merge the warps' sums of a split and add them to the totals, or store them for `combine`. */
DEVICE void merge_split(struct merged &merged, struct sums &sums, const struct problem &problem, int split, int first) {
    int thread = (int)threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, j = lane % 4;
    int64_t place = (int64_t)blockIdx.x * problem.num_splits + split;
    merge_columns(merged, sums, split);
#pragma unroll
    for (int k = 0; k < BLOCKS; k += MERGED_BLOCKS) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4 * MERGED_BLOCKS; i++)
                merged.part[warp][8 * n + 2 * j + i % 2][i / 4 * 16 + g + i % 4 / 2 * 8] = sums.o[n][k + i / 4][i % 4];
        __syncthreads();
        for (int i = thread; i < COLUMNS * MERGED_DIMS / 4; i += THREADS) {
            int column = i / (MERGED_DIMS / 4), at = i % (MERGED_DIMS / 4) * 4;
            float4 o = sum_of_warps(merged, column, at);
            if (problem.partial)
                store_partial(problem, merged, place, first, column, 16 * k + at, o);
            else
                fold_split(merged, split, column, 16 * k + at, o);
        }
        __syncthreads();
    }
}

#endif
