/* Products of experts with very many tokens each, on sm_90: as in many.cu, every warp has row tiles of its own and dequantizes
 * them in registers, but four warps at a time multiply them asynchronously with the activations of 8 MT tokens in shared
 * memory. While the matrix units work on a step of 16 columns, the warps make the operands of the next. A block takes one
 * tile of rows and tokens after the other; while it stores one, copies of the next are under way.
 *
 * Activations lie in the order in which steps add them up (rows.cu, in_steps), as a lane's columns are those of four steps.
 *
 * Defines: those of fragments.cuh; WARPS, a multiple of 4; MIN_BLOCKS; STAGES, at least 4. */

#include "fragments.cuh"
#include "warpgroups.cuh"

enum {
    TOKENS = 8 * MT,
    STEPS = GROUP / 16,
    BEHIND = 2,                                    /* steps that go on while operands are made; less than STEPS */
    ROW_BYTES = GROUP * 2,
    TOKEN_BYTES = TOKENS * ROW_BYTES,              /* of a stage; a multiple of 1024 */
    COPY_TOKENS = WARPS * WARP / (GROUP / 8),      /* tokens of which all threads copy 16 bytes of a group at once */
    COPIES = TOKENS / COPY_TOKENS,
    HALF = MT < 16 ? MT : MT / 2,                  /* tiles that are enough for few tokens */
    SCALE_COPIES = SCALES * 2 / 16,                /* of 16 bytes, per row tile and group */
    WORD_BYTES = NT * 512,
    WARP_BYTES = WORD_BYTES + NT * SCALES * 2,
    STAGE_BYTES = TOKEN_BYTES + WARPS * WARP_BYTES,
    AHEAD = STAGES - 2,                            /* groups under way; the one before this is still being read */
    PART = MT < 8 ? MT : 8,                        /* tiles of tokens that a warp stores at once */
    PLACES = MT / 2,                               /* tokens of which a lane stores eight rows */
    STORE_STRIDE = 48,                             /* bytes: eight rows of 16 bytes meet all banks */
    STORE_BYTES = 8 * PART * STORE_STRIDE          /* of a warp, behind all stages */
};
static_assert(TOKENS % COPY_TOKENS == 0 && COPY_TOKENS % 8 == 0, "threads share the copies of a group evenly");

/* What a thread copies in every group. */
struct copies {
    const uint4 *x;
    const uint4 *words;    /* of its lane */
    const uint4 *scales;   /* of its tile; a lane has 16 bytes of one tile, or nothing */
    uint32_t from[COPIES]; /* which 16 bytes of x, in the first group */
    int start[NT];         /* groups before those of every row tile */
    int scale_start;
};

/* Pairs of the tokens whose activations a thread copies. Tokens that are not there repeat the last one; what they give is not
 * stored. */
DEVICE void find_pairs(int (&pairs)[COPIES], const struct routes &routes, const struct tile &tile) {
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        int token = least((int)threadIdx.x / (GROUP / 8) + c * COPY_TOKENS, tile.count - 1);
        pairs[c] = tile.expert < 0 ? 0 : routes.order[tile.first + token];
    }
}

/* 32 bits are enough for 64 GiB of x. */
DEVICE void find_rows(struct copies &copies, const int (&pairs)[COPIES], int pairs_per_row, int groups) {
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        uint32_t row = (uint32_t)pairs[c] / (uint32_t)pairs_per_row;
        copies.from[c] = row * (uint32_t)groups * (GROUP / 8) + threadIdx.x % (GROUP / 8);
    }
}

DEVICE void find_weights(struct copies &copies, int expert, int parts, int part_rows, int first, int groups) {
    int lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < NT; i++) copies.start[i] = first_group(i, expert, parts, part_rows, first, groups);
    copies.scale_start = first_group(lane / SCALE_COPIES % NT, expert, parts, part_rows, first, groups);
}

/* The stages' activations, and behind them all the stages of each warp's weights. */
DEVICE unsigned char *own_weights(unsigned char *shared, int group) {
    int warp = (int)threadIdx.x / WARP;
    return shared + STAGES * TOKEN_BYTES + (warp * STAGES + group % STAGES) * WARP_BYTES;
}

/* Begin to copy a group to its stage, with the activations of so many tiles, and end a group of copies in any case. */
template <int tiles> DEVICE void copy_group(unsigned char *shared, const struct copies &copies, int group, int groups) {
    int lane = (int)threadIdx.x % WARP, token = (int)threadIdx.x / (GROUP / 8), piece = (int)threadIdx.x % (GROUP / 8);
    unsigned char *own = own_weights(shared, group);
    unsigned char *to = shared + group % STAGES * TOKEN_BYTES + token * ROW_BYTES + 16 * (piece ^ token % 8);
    int is_there = group < groups; /* no branch: copies are made in the middle of products */
#pragma unroll
    for (int i = 0; i < NT; i++)
        copy_async(own + i * 512 + lane * 16, copies.words + (int64_t)(copies.start[i] + group) * WARP, is_there);
    if (lane < NT * SCALE_COPIES)
        copy_async(own + WORD_BYTES + lane * 16, copies.scales + (int64_t)(copies.scale_start + group) * SCALE_COPIES,
                   is_there);
#pragma unroll
    for (int c = 0; c < COPIES * tiles / MT; c++)
        copy_async(to + c * COPY_TOKENS * ROW_BYTES, copies.x + (copies.from[c] + (uint32_t)group * (GROUP / 8)), is_there);
    commit_copies();
}

DEVICE struct weights own_group(const unsigned char *own) {
    int lane = (int)threadIdx.x % WARP;
    struct weights weights;
#pragma unroll
    for (int i = 0; i < NT; i++) {
        weights.words[i] = reinterpret_cast<const uint4 *>(own)[i * WARP + lane];
        weights.scales[i] = reinterpret_cast<const uint16_t *>(own + WORD_BYTES)[i * SCALES + scale_of_lane()];
    }
    return weights;
}

/* The operands of a step. */
DEVICE void expand_step(const struct weights &weights, const uint32_t (&scale)[NT][2], int t, uint32_t (&a)[NT][4]) {
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t word[STEPS] = {weights.words[i].x, weights.words[i].y, weights.words[i].z, weights.words[i].w};
        expand(word[t], scale[i], a[i]);
    }
}

/* Begin to copy the first groups of a tile. */
DEVICE void copy_first_groups(unsigned char *shared, const struct copies &copies, int count, int groups) {
    for (int group = 0; group < AHEAD; group++)
        if (MT < 16 || count > TOKENS / 2)
            copy_group<MT>(shared, copies, group, groups);
        else
            copy_group<HALF>(shared, copies, group, groups);
}

/* Sums of the first so many tiles of tokens, whose first groups are being copied. */
template <int tiles>
DEVICE void multiply_tiles(float (&sum)[NT][MT][4], unsigned char *shared, const struct copies &copies, int groups) {
    uint32_t a[STEPS][NT][4];
#pragma unroll 1
    for (int group = 0; group < groups; group++) {
        await_copies<AHEAD - 1>();
        show_copies();
        __syncwarp();
        struct weights weights = own_group(own_weights(shared, group));
        uint64_t tokens = rows_of_64(shared_address(shared + group % STAGES * TOKEN_BYTES));
        uint32_t scale[NT][2];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            scale[i][0] = scale_pair(weights.scales[i] & 0xFF);
            scale[i][1] = scale_pair(weights.scales[i] >> 8);
        }
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            await_products<BEHIND>(); /* this step of the group before is over, whose operands are overwritten */
            expand_step(weights, scale, t, a[t]);
            if (t == 0) __syncthreads(); /* this group is there for all; the stage of the one before the last is free */
            begin_products();
#pragma unroll
            for (int i = 0; i < NT; i++)
                multiply_async(reinterpret_cast<float(&)[tiles][4]>(sum[i]), a[t][i], tokens + 2 * t);
            commit_products();
            if (t == 0) copy_group<tiles>(shared, copies, group + AHEAD, groups);
        }
    }
    await_products<0>();
    await_copies<0>();
    show_copies();
}

/* A half of the tiles is enough for many an expert's last tokens. */
DEVICE void multiply_tile(float (&sum)[NT][MT][4], unsigned char *shared, const struct copies &copies, int count,
                          int groups) {
    clear(sum);
    if (MT < 16 || count > TOKENS / 2)
        multiply_tiles<MT>(sum, shared, copies, groups);
    else
        multiply_tiles<HALF>(sum, shared, copies, groups);
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) settle(sum[i][m][c]);
}

/* Pairs of the tokens that a lane stores, -1 where there is none. */
DEVICE void find_places(int (&places)[PLACES], const struct routes &routes, const struct tile &tile) {
#pragma unroll
    for (int k = 0; k < PLACES; k++) {
        int token = (int)threadIdx.x % WARP / 2 + 16 * k;
        places[k] = token < tile.count ? routes.order[tile.first + token] : -1;
    }
}

/* Store a row tile; value(m, c) is sum c of tile m of tokens. `own` is the warp's memory for it. */
template <class Value>
DEVICE void store_tile(unsigned char *own, const int (&places)[PLACES], int row, int width, uint16_t *out, Value value) {
    int lane = (int)threadIdx.x % WARP;
    if (row >= width) return;
#pragma unroll
    for (int from = 0; from < MT; from += PART) {
        __syncwarp(); /* the part before has been read */
#pragma unroll
        for (int m = 0; m < PART; m += 2) {
            uint32_t halves[4]; /* rows 0 .. 7 and 8 .. 15 of two tiles */
#pragma unroll
            for (int i = 0; i < 4; i++)
                halves[i] = bf16x2_of(value(from + m + i / 2, i % 2 * 2), value(from + m + i / 2, i % 2 * 2 + 1));
            int token = 8 * (m + lane / 16) + lane % 8;
            store_matrices_transposed(own + token * STORE_STRIDE + lane / 8 % 2 * 16, halves);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < PART / 2; k++) {
            uint4 eight = *reinterpret_cast<const uint4 *>(own + (lane / 2 + 16 * k) * STORE_STRIDE + lane % 2 * 16);
            int64_t pair = places[from / 2 + k];
            if (pair >= 0) *reinterpret_cast<uint4 *>(out + pair * width + row + lane % 2 * 8) = eight;
        }
    }
}

/* The operands of a product: `parts` matrices of `width` rows for every expert, and pairs_per_row rows of x for a token. */
struct product {
    const uint4 *words;
    const uint16_t *scales;
    const int8_t *exponents;
    const uint16_t *x;
    struct routes routes;
    int num_tiles, groups, parts, width, pairs_per_row;
};

/* Where a block's next tile of tokens lies in the list; blocks of rows of one tile of tokens are neighbours, and run at the
 * same time. */
DEVICE uint2 find_tile(const struct product &product, int item, int row_blocks) {
    int at = item / row_blocks;
    if (at >= product.num_tiles) return make_uint2(~0u, 0);
    return make_uint2((uint32_t)product.routes.tiles[2 * at], (uint32_t)product.routes.tiles[2 * at + 1]);
}

DEVICE struct tile tile_at(const struct product &product, uint2 found) {
    struct tile tile = {(int)found.x, (int)found.y, 0};
    if (tile.expert >= 0) tile.count = least(TOKENS, product.routes.offsets[tile.expert + 1] - tile.first);
    return tile;
}

/* Compute all tiles of a block; store(sum, factor, places, first, own) gets the sums of rows from tile `first` of a part
 * on, to be multiplied by `factor`. What the next tiles need of the lists is read long before it is used. */
template <class Store> DEVICE void multiply_all(unsigned char *shared, const struct product &product, Store store) {
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, of_warp = NT / product.parts;
    int row_blocks = (product.width / TILE_ROWS + WARPS * of_warp - 1) / (WARPS * of_warp), item = (int)blockIdx.x;
    struct tile tile = tile_at(product, find_tile(product, item, row_blocks));
    struct tile next = tile_at(product, find_tile(product, item + (int)gridDim.x, row_blocks));
    struct copies copies;
    copies.x = reinterpret_cast<const uint4 *>(product.x);
    copies.words = product.words + lane;
    copies.scales = reinterpret_cast<const uint4 *>(product.scales) + lane % SCALE_COPIES;
    int pairs[COPIES], first = (item % row_blocks * WARPS + warp) * of_warp;
    if (tile.expert < 0) return;
    find_pairs(pairs, product.routes, tile);
    find_rows(copies, pairs, product.pairs_per_row, product.groups);
    find_weights(copies, tile.expert, product.parts, product.width, first, product.groups);
    copy_first_groups(shared, copies, tile.count, product.groups);
    for (;;) {
        float sum[NT][MT][4];
        int exponent = product.exponents[tile.expert];
        find_pairs(pairs, product.routes, next);
        uint2 after = find_tile(product, item + 2 * (int)gridDim.x, row_blocks);
        multiply_tile(sum, shared, copies, tile.count, product.groups);
        int places[PLACES];
        find_places(places, product.routes, tile);
        __syncthreads(); /* nobody reads a stage any more */
        item += (int)gridDim.x;
        int next_first = (item % row_blocks * WARPS + warp) * of_warp;
        if (next.expert >= 0) {
            find_rows(copies, pairs, product.pairs_per_row, product.groups);
            find_weights(copies, next.expert, product.parts, product.width, next_first, product.groups);
            copy_first_groups(shared, copies, next.count, product.groups);
        }
        struct tile last = tile_at(product, after);
        float factor = power_of_two(exponent + PRODUCT_EXPONENT);
        store(sum, factor, places, first, shared + STAGES * STAGE_BYTES + warp * STORE_BYTES);
        if (next.expert < 0) return;
        tile = next;
        first = next_first;
        next = last;
    }
}

/* The shared memory from the first multiple of 1024 on. */
DEVICE unsigned char *from_1024(unsigned char *shared) { return shared + (0u - shared_address(shared)) % 1024; }

/* As gate_up_few. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) gate_up_wide(const uint4 *words, const uint16_t *scales, const int8_t *exponents,
                                                  const uint16_t *x, const int *order, const int *offsets,
                                                  const int *tiles, int num_tiles, int groups, int width, int top_k,
                                                  uint16_t *h) {
    await_earlier();
    DYNAMIC_SHARED(unsigned char, shared);
    struct product product = {words, scales, exponents, x, {order, offsets, tiles}, num_tiles, groups, 2, width, top_k};
    multiply_all(from_1024(shared), product, [&](auto &sum, float factor, auto &places, int first, unsigned char *own) {
#pragma unroll
        for (int i = 0; i < NT / 2; i++)
            store_tile(own, places, (first + i) * TILE_ROWS, width, h, [&](int m, int c) {
                return swiglu(sum[i][m][c] * factor, sum[NT / 2 + i][m][c] * factor);
            });
    });
}

/* As down_few. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) down_wide(const uint4 *words, const uint16_t *scales, const int8_t *exponents,
                                               const uint16_t *h, const int *order, const int *offsets,
                                               const int *tiles, int num_tiles, int groups, int width, uint16_t *y) {
    await_earlier();
    DYNAMIC_SHARED(unsigned char, shared);
    struct product product = {words, scales, exponents, h, {order, offsets, tiles}, num_tiles, groups, 1, width, 1};
    multiply_all(from_1024(shared), product, [&](auto &sum, float factor, auto &places, int first, unsigned char *own) {
#pragma unroll
        for (int i = 0; i < NT; i++)
            store_tile(own, places, (first + i) * TILE_ROWS, width, y,
                       [&](int m, int c) { return sum[i][m][c] * factor; });
    });
}
