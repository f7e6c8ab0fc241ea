/* Products of experts with few tokens each: time goes to the bytes of the weights, so every warp of a block reads its own
 * part of K, with STAGES groups of columns of weights and tokens in flight, and the parts are added in the order of the warps.
 *
 * Defines: those of fragments.cuh; WARPS; MIN_BLOCKS; STAGES. */

#include "fragments.cuh"

enum { ROWS = NT * TILE_ROWS, COLUMNS = 8 };

/* Where a lane's part of NT row tiles lies. */
struct weights_at {
    const uint4 *words;     /* of the lane, in the first tile and group */
    const uint16_t *scales;
    int start[NT];          /* groups before those of every tile */
};

DEVICE struct weights_at find_weights(const uint4 *words, const uint16_t *scales, int expert, int parts, int part_rows,
                                      int first, int groups) {
    struct weights_at at = {words + threadIdx.x % WARP, scales + scale_of_lane(), {}};
#pragma unroll
    for (int i = 0; i < NT; i++) at.start[i] = first_group(i, expert, parts, part_rows, first, groups);
    return at;
}

DEVICE struct weights load_weights(const struct weights_at &at, int group) {
    struct weights weights;
#pragma unroll
    for (int i = 0; i < NT; i++) {
        weights.words[i] = load_once(at.words + (int64_t)(at.start[i] + group) * WARP);
        weights.scales[i] = at.scales[(int64_t)(at.start[i] + group) * SCALES];
    }
    return weights;
}

/* Sums of the warp over its groups. source[m] is the row of x of the lane's token of tile m, or null. */
DEVICE void sum_groups(float (&sum)[NT][MT][4], const struct weights_at &at, const uint16_t *const (&source)[MT],
                       int groups) {
    int warp = (int)threadIdx.x / WARP;
    clear(sum);
    for (int first = warp; first < groups; first += WARPS * STAGES) {
        struct weights weights[STAGES];
        uint4 tokens[STAGES][MT][2];
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            if (first + s * WARPS < groups) weights[s] = load_weights(at, first + s * WARPS);
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            int group = first + s * WARPS;
#pragma unroll
            for (int m = 0; m < MT; m++)
                for (int half = 0; half < 2; half++) {
                    const uint16_t *from = source[m] + (int64_t)group * GROUP + 8 * half;
                    bool is_there = source[m] && group < groups;
                    tokens[s][m][half] = is_there ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
                }
        }
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            if (first + s * WARPS >= groups) break;
            multiply_group(sum, weights[s], [&](int m, int half) { return tokens[s][m][half]; });
        }
    }
}

/* One token tile times NT row tiles of an expert; store(pair, row, first, second) gets the sums of rows `row` and + 1,
 * counted from the block's first row of a part; of the second part, if there is one, as first[1] and second[1]. */
template <class Store>
DEVICE void multiply_tile(float (*shared)[ROWS][COLUMNS + 1], const struct routes &routes, const struct tile &tile,
                          const struct weights_at &at, const uint16_t *const (&source)[MT], int groups, int parts,
                          float factor, Store store) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, g = lane / 4, j = lane % 4;
    int part_rows = ROWS / parts;
    float sum[NT][MT][4];
    sum_groups(sum, at, source, groups);
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (m) __syncthreads();
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                shared[warp][i * TILE_ROWS + g + 8 * (c / 2)][2 * j + c % 2] = sum[i][m][c];
        __syncthreads();
        for (int q = (int)threadIdx.x; q < part_rows / 2 * COLUMNS; q += WARPS * WARP) {
            int row = 2 * (q % (part_rows / 2)), column = q / (part_rows / 2);
            if (8 * m + column >= tile.count) continue;
            float total[2][2];
            for (int part = 0; part < parts; part++)
                for (int odd = 0; odd < 2; odd++) {
                    float found = 0.0f;
                    for (int w = 0; w < WARPS; w++) found += shared[w][part * part_rows + row + odd][column];
                    total[odd][part] = found * factor;
                }
            store(routes.order[tile.first + 8 * m + column], row, total[0], total[1]);
        }
    }
}

/* The rows of x that the lane's tokens have: of pair p, row p / pairs_per_row. */
DEVICE void find_sources(const uint16_t *(&source)[MT], const uint16_t *x, const struct routes &routes,
                         const struct tile &tile, int pairs_per_row, int groups) {
    int g = (int)threadIdx.x % WARP / 4, j = (int)threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        source[m] = nullptr;
        if (8 * m + g >= tile.count) continue;
        int64_t row = routes.order[tile.first + 8 * m + g] / pairs_per_row;
        source[m] = x + row * groups * GROUP + j * LANE_COLUMNS;
    }
}

/* h[pair] = R(R(silu(g)) u) with (g, u) = R(W13 x[pair / top_k]); `width` rows each of gate and up. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) gate_up_few(const uint4 *words, const uint16_t *scales, const int8_t *exponents,
                                                 const uint16_t *x, const int *order, const int *offsets,
                                                 const int *tiles, int groups, int width, int top_k, uint16_t *h) {
    await_earlier();
    SHARED float shared[WARPS][ROWS][COLUMNS + 1];
    struct routes routes = {order, offsets, tiles};
    struct tile tile = read_tile(routes, (int)blockIdx.y);
    if (tile.expert < 0) return;
    int first = (int)blockIdx.x * (NT / 2);
    const uint16_t *source[MT];
    find_sources(source, x, routes, tile, top_k, groups);
    struct weights_at at = find_weights(words, scales, tile.expert, 2, width, first, groups);
    float factor = power_of_two(exponents[tile.expert] + PRODUCT_EXPONENT);
    multiply_tile(shared, routes, tile, at, source, groups, 2, factor,
                  [&](int64_t pair, int row, const float *even, const float *odd) {
                      row += first * TILE_ROWS;
                      if (row >= width) return;
                      uint32_t both = bf16x2_of(swiglu(even[0], even[1]), swiglu(odd[0], odd[1]));
                      *reinterpret_cast<uint32_t *>(h + pair * width + row) = both;
                  });
}

/* y[pair] = R(W2 h[pair]), `width` rows. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) down_few(const uint4 *words, const uint16_t *scales, const int8_t *exponents,
                                              const uint16_t *h, const int *order, const int *offsets, const int *tiles,
                                              int groups, int width, uint16_t *y) {
    await_earlier();
    SHARED float shared[WARPS][ROWS][COLUMNS + 1];
    struct routes routes = {order, offsets, tiles};
    struct tile tile = read_tile(routes, (int)blockIdx.y);
    if (tile.expert < 0) return;
    int first = (int)blockIdx.x * NT;
    const uint16_t *source[MT];
    find_sources(source, h, routes, tile, 1, groups);
    struct weights_at at = find_weights(words, scales, tile.expert, 1, width, first, groups);
    float factor = power_of_two(exponents[tile.expert] + PRODUCT_EXPONENT);
    multiply_tile(shared, routes, tile, at, source, groups, 1, factor,
                  [&](int64_t pair, int row, const float *even, const float *odd) {
                      row += first * TILE_ROWS;
                      if (row >= width) return;
                      *reinterpret_cast<uint32_t *>(y + pair * width + row) = bf16x2_of(even[0], odd[0]);
                  });
}
