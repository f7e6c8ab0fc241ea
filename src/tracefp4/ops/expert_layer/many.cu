/* Products of experts with many tokens each: every warp of a block has row tiles of its own and dequantizes them once, in
 * registers, for 8 MT tokens. Activations, which all warps read, and each warp's weights are copied to shared memory
 * asynchronously, STAGES groups of columns deep; registers are left to the sums.
 *
 * Defines: those of fragments.cuh; WARPS; MIN_BLOCKS; STAGES, at least 2. */

#include "fragments.cuh"

enum {
    TOKENS = 8 * MT,
    STRIDE = GROUP + 8,                           /* 144 bytes: eight lanes that read 16 bytes each meet all banks */
    PIECES = TOKENS * (GROUP / 8),                /* of 16 bytes: the activations of a group */
    COPIES = (PIECES + WARPS * 32 - 1) / (WARPS * 32),
    SCALE_COPIES = SCALES * 2 / 16,               /* of 16 bytes, per row tile and group */
    WORD_BYTES = NT * 512,
    WARP_BYTES = WORD_BYTES + NT * SCALES * 2,
    STAGE_BYTES = TOKENS * STRIDE * 2 + WARPS * WARP_BYTES
};

/* What a thread copies in every group. */
struct copies {
    const uint16_t *x;
    const uint4 *words;  /* of its lane */
    const uint4 *scales; /* of its tile; a lane has 16 bytes of one tile, or nothing */
    int row[COPIES];     /* of x; -1 for tokens that are not there */
    int start[NT];       /* groups before those of every row tile */
    int scale_start;
};

DEVICE struct copies find_copies(const uint16_t *x, const struct routes &routes, const struct tile &tile,
                                 int pairs_per_row) {
    struct copies copies;
    copies.x = x;
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        int token = ((int)threadIdx.x + c * WARPS * WARP) / (GROUP / 8);
        copies.row[c] = token < tile.count ? routes.order[tile.first + token] / pairs_per_row : -1;
    }
    return copies;
}

DEVICE void find_weights(struct copies &copies, const uint4 *words, const uint16_t *scales, int expert, int parts,
                         int part_rows, int first, int groups) {
    int lane = (int)threadIdx.x % WARP;
    copies.words = words + lane;
    copies.scales = reinterpret_cast<const uint4 *>(scales) + lane % SCALE_COPIES;
#pragma unroll
    for (int i = 0; i < NT; i++) copies.start[i] = first_group(i, expert, parts, part_rows, first, groups);
    copies.scale_start = first_group(lane / SCALE_COPIES % NT, expert, parts, part_rows, first, groups);
}

/* Begin to copy a group to its stage, and end a group of copies in any case. */
DEVICE void copy_group(unsigned char *shared, const struct copies &copies, int group, int groups) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    unsigned char *stage = shared + group % STAGES * STAGE_BYTES, *own = stage + TOKENS * STRIDE * 2 + warp * WARP_BYTES;
    if (group < groups) {
#pragma unroll
        for (int i = 0; i < NT; i++)
            copy_async(own + i * 512 + lane * 16, copies.words + (int64_t)(copies.start[i] + group) * WARP, 1);
        if (lane < NT * SCALE_COPIES)
            copy_async(own + WORD_BYTES + lane * 16,
                       copies.scales + (int64_t)(copies.scale_start + group) * SCALE_COPIES, 1);
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            int q = (int)threadIdx.x + c * WARPS * WARP, token = q / (GROUP / 8), piece = q % (GROUP / 8);
            int64_t from = ((int64_t)most(copies.row[c], 0) * groups + group) * GROUP + 8 * piece;
            if (q < PIECES) copy_async(stage + token * STRIDE * 2 + 16 * piece, copies.x + from, copies.row[c] >= 0);
        }
    }
    commit_copies();
}

DEVICE void multiply_tile(float (&sum)[NT][MT][4], unsigned char *shared, const struct copies &copies, int groups) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, g = lane / 4, j = lane % 4;
    clear(sum);
    for (int group = 0; group < STAGES - 1; group++) copy_group(shared, copies, group, groups);
    for (int group = 0; group < groups; group++) {
        await_copies<STAGES - 2>();
        __syncthreads(); /* this group is there for all, and nobody reads the stage of the one before it */
        copy_group(shared, copies, group + STAGES - 1, groups);
        const unsigned char *stage = shared + group % STAGES * STAGE_BYTES;
        const unsigned char *own = stage + TOKENS * STRIDE * 2 + warp * WARP_BYTES;
        struct weights weights;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            weights.words[i] = reinterpret_cast<const uint4 *>(own)[i * WARP + lane];
            weights.scales[i] = reinterpret_cast<const uint16_t *>(own + WORD_BYTES)[i * SCALES + scale_of_lane()];
        }
        multiply_group(sum, weights, [&](int m, int half) {
            return *reinterpret_cast<const uint4 *>(stage + ((8 * m + g) * STRIDE + j * LANE_COLUMNS + 8 * half) * 2);
        });
    }
    await_copies<0>();
}

/* Store two rows, g and g + 8 of a row tile, for two tokens each, as the lane holds them: in each half of the tile, a
 * transposition over the warp gives every lane two neighbouring rows of one token. */
DEVICE void store_tile(const float (&value)[4], const struct routes &routes, const struct tile &tile, int m, int row,
                       int width, uint16_t *out) {
    int lane = (int)threadIdx.x % WARP, token = 8 * m + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t both = transpose_8x8(bf16x2_of(value[2 * half], value[2 * half + 1]));
        if (token >= tile.count || row >= width) continue;
        int64_t pair = routes.order[tile.first + token];
        *reinterpret_cast<uint32_t *>(out + pair * width + row + 8 * half + 2 * (lane % 4)) = both;
    }
}

/* As gate_up_few. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) gate_up_many(const uint4 *words, const uint16_t *scales, const int8_t *exponents,
                                                  const uint16_t *x, const int *order, const int *offsets,
                                                  const int *tiles, int groups, int width, int top_k, uint16_t *h) {
    await_earlier();
    DYNAMIC_SHARED(unsigned char, shared);
    struct routes routes = {order, offsets, tiles};
    struct tile tile = read_tile(routes, (int)blockIdx.y);
    if (tile.expert < 0) return;
    int first = ((int)blockIdx.x * WARPS + (int)threadIdx.x / WARP) * (NT / 2);
    float sum[NT][MT][4], factor = power_of_two(exponents[tile.expert] + PRODUCT_EXPONENT);
    struct copies copies = find_copies(x, routes, tile, top_k);
    find_weights(copies, words, scales, tile.expert, 2, width, first, groups);
    multiply_tile(sum, shared, copies, groups);
#pragma unroll
    for (int i = 0; i < NT / 2; i++)
#pragma unroll
        for (int m = 0; m < MT; m++) {
            float value[4];
            for (int c = 0; c < 4; c++) value[c] = swiglu(sum[i][m][c] * factor, sum[NT / 2 + i][m][c] * factor);
            store_tile(value, routes, tile, m, (first + i) * TILE_ROWS, width, h);
        }
}

/* As down_few. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) down_many(const uint4 *words, const uint16_t *scales, const int8_t *exponents,
                                               const uint16_t *h, const int *order, const int *offsets,
                                               const int *tiles, int groups, int width, uint16_t *y) {
    await_earlier();
    DYNAMIC_SHARED(unsigned char, shared);
    struct routes routes = {order, offsets, tiles};
    struct tile tile = read_tile(routes, (int)blockIdx.y);
    if (tile.expert < 0) return;
    int first = ((int)blockIdx.x * WARPS + (int)threadIdx.x / WARP) * NT;
    float sum[NT][MT][4], factor = power_of_two(exponents[tile.expert] + PRODUCT_EXPONENT);
    struct copies copies = find_copies(h, routes, tile, 1);
    find_weights(copies, words, scales, tile.expert, 1, width, first, groups);
    multiply_tile(sum, shared, copies, groups);
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int m = 0; m < MT; m++) {
            float value[4];
            for (int c = 0; c < 4; c++) value[c] = sum[i][m][c] * factor;
            store_tile(value, routes, tile, m, (first + i) * TILE_ROWS, width, y);
        }
}
