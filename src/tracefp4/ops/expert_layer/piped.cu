/* Products of experts with very many tokens each, on sm_90: as in many.cu, every warp dequantizes row tiles of its own in
 * registers, but multiplies them asynchronously (warpgroups.cuh) with 128 tokens in shared memory, and dequantizes the next
 * step meanwhile. Four warps that do nothing else copy what eight others multiply, STAGES groups of columns deep and without
 * a pause between tiles; the blocks, as many as there are multiprocessors, take the tiles in turn.
 *
 * Defines: those of fragments.cuh, NT 2 and MT 8 or 16; WARPS, that multiply, a multiple of 4; STAGES, at least AHEAD + 2. */

#include "barriers.cuh"
#include "fragments.cuh"
#include "warpgroups.cuh"

enum {
    TILES = WARPS * NT,               /* row tiles of a block: the first half of the warps' tiles, then the second */
    COPIERS = 4,                      /* warps that copy */
    TOKENS = 8 * MT,
    ROW_BYTES = GROUP * 2,
    X_BYTES = TOKENS * ROW_BYTES,
    SCALE_BYTES = SCALES * 2,         /* of a row tile and group */
    SCALE_COPIES = SCALE_BYTES / 16,
    STAGE_BYTES = (X_BYTES + TILES * (512 + SCALE_BYTES) + 1023) / 1024 * 1024,
    AHEAD = 2,                        /* groups under way behind the one that has to be there */
    STORE_STRIDE = 48,                /* bytes: eight rows of 16 bytes meet all banks */
    STORE_BYTES = WARP * STORE_STRIDE, /* of a warp: results of 32 tokens */
    STEPS = GROUP / 16,
    HALF = MT == 16 ? 8 : MT,         /* tiles of tokens to multiply where there are no more */
    LAG = STAGES - AHEAD - 2,         /* groups that the second four warps stay behind, so that they multiply while the first
                                         store; the stages in use by both, and those under way, have to do */
    BEHIND = 2                        /* steps under way while the operands of the next are made; less than STEPS */
};

struct stage {
    unsigned char *x, *words, *scales;
};

/* The stages, and on whom they wait. */
struct ring {
    unsigned char *shared;
    uint64_t *full, *empty; /* [STAGES] */
    uint64_t *lag;          /* ends when the first four warps are as far ahead as they stay */
    int at;                 /* the stage of the next group */
    uint32_t digit;         /* of the phase of `full` in which it comes */
};

DEVICE struct stage stage_of(const struct ring &ring, int at) {
    unsigned char *x = ring.shared + at * STAGE_BYTES;
    return {x, x + X_BYTES, x + X_BYTES + TILES * 512};
}

DEVICE void advance(struct ring &ring) {
    ring.digit ^= ++ring.at == STAGES;
    ring.at = ring.at == STAGES ? 0 : ring.at;
}

/* All stages are empty; to be followed by a barrier. */
DEVICE struct ring begin_ring(unsigned char *shared) {
    shared += -shared_address(shared) & 1023;
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + STAGES * STAGE_BYTES + WARPS * STORE_BYTES);
    struct ring ring = {shared, barriers, barriers + STAGES, barriers + 2 * STAGES, 0, 0};
    if (threadIdx.x == 0) {
        begin_barrier(ring.lag, WARPS / 2);
        for (int s = 0; s < STAGES; s++) {
            begin_barrier(ring.full + s, COPIERS);
            begin_barrier(ring.empty + s, WARPS);
        }
    }
    return ring;
}

struct operands {
    const uint4 *words, *scales;
    const int8_t *exponents;
    const uint4 *x; /* in steps; see rows.cu */
    struct routes routes;
    int groups, width, pairs_per_row, num_tiles;
};

/* A block's share of the work: token tile by token tile, all rows of each one after the other. */
struct work {
    int index;
    int first; /* row tile of each part */
    struct tile tile;
};

/* Whether there is something to do; then what, and the index moves on. */
template <int parts> DEVICE bool find_work(struct work &work, const struct operands &of) {
    int row_blocks = (of.width + TILES / parts * TILE_ROWS - 1) / (TILES / parts * TILE_ROWS);
    if (work.index >= of.num_tiles * row_blocks) return false;
    work.tile = read_tile(of.routes, work.index / row_blocks);
    work.first = work.index % row_blocks * (TILES / parts);
    work.index += (int)gridDim.x;
    return work.tile.expert >= 0;
}

enum { X_COPIES = TOKENS * 8 / (COPIERS * WARP), WORD_COPIES = TILES / COPIERS };

/* What a copying thread reads, in pieces of 16 bytes. Tokens beyond the last one repeat it. */
struct sources {
    uint32_t x[X_COPIES]; /* 32 bits are enough for 64 GiB of activations */
    int words[WORD_COPIES], scales;
};

/* Number of the first group of a block's row tile; as first_group. */
DEVICE int first_group_of(int index, int expert, int parts, int part_rows, int first, int groups) {
    int of_part = part_rows / TILE_ROWS, tile = least(first + index % (TILES / parts), of_part - 1);
    return ((expert * parts + index / (TILES / parts)) * of_part + tile) * groups;
}

DEVICE struct sources find_sources(const struct operands &of, const struct tile &tile, int parts, int first) {
    int mine = (int)threadIdx.x - WARPS * WARP;
    struct sources sources;
#pragma unroll
    for (int c = 0; c < X_COPIES; c++) {
        int token = least(c * (COPIERS * WARP / 8) + mine / 8, tile.count - 1);
        uint32_t row = (uint32_t)(of.routes.order[tile.first + token] / of.pairs_per_row);
        sources.x[c] = row * (uint32_t)(of.groups * 8) + (uint32_t)(mine % 8);
    }
#pragma unroll
    for (int c = 0; c < WORD_COPIES; c++)
        sources.words[c] = first_group_of(c * COPIERS + mine / WARP, tile.expert, parts, of.width, first, of.groups);
    sources.scales = first_group_of(mine / SCALE_COPIES % TILES, tile.expert, parts, of.width, first, of.groups);
    return sources;
}

DEVICE void copy_group(const struct stage &stage, const struct operands &of, const struct sources &sources, int group,
                       bool is_half) {
    int mine = (int)threadIdx.x - WARPS * WARP, lane = mine % WARP, token = mine / 8, piece = mine % 8 ^ token % 8;
#pragma unroll
    for (int c = 0; c < X_COPIES; c++)
        if (c < X_COPIES * HALF / MT || !is_half)
            copy_async(stage.x + (c * (COPIERS * WARP / 8) + token) * ROW_BYTES + piece * 16,
                       of.x + group * 8 + (uint64_t)sources.x[c], 1);
#pragma unroll
    for (int c = 0; c < WORD_COPIES; c++)
        copy_async(stage.words + ((c * COPIERS + mine / WARP) * WARP + lane) * 16,
                   of.words + (int64_t)(sources.words[c] + group) * WARP + lane, 1);
    if (mine < TILES * SCALE_COPIES)
        copy_async(stage.scales + mine * 16,
                   of.scales + (int64_t)(sources.scales + group) * SCALE_COPIES + mine % SCALE_COPIES, 1);
}

/* Say that the stage `back` groups behind is full: what this thread copied to it has arrived. */
DEVICE void announce(const struct ring &ring, int back) {
    show_copies();
    __syncwarp();
    if (threadIdx.x % WARP == 0) arrive(ring.full + (ring.at + STAGES - back) % STAGES);
}

/* The copying warps. */
template <int parts> DEVICE void copy_all(struct ring ring, const struct operands &of) {
    int under_way = 0;
    for (struct work work = {(int)blockIdx.x, 0, {}}; find_work<parts>(work, of);) {
        struct sources sources = find_sources(of, work.tile, parts, work.first);
        for (int group = 0; group < of.groups; group++) {
            await_phase(ring.empty + ring.at, ring.digit ^ 1);
            copy_group(stage_of(ring, ring.at), of, sources, group, work.tile.count <= 8 * HALF);
            commit_copies();
            await_copies<AHEAD>();
            if (under_way == AHEAD)
                announce(ring, AHEAD);
            else
                under_way++;
            advance(ring);
        }
    }
    await_copies<0>();
    for (; under_way > 0; under_way--) announce(ring, under_way);
}

/* Sums of a tile: of the warp's two row tiles, and as mma_bf16 has them of every 8 tokens; of the first `tiles` of them. The
 * stage of the last group is still held by the products under way when the next begins. */
template <int tiles> DEVICE void multiply_tile(float (&sum)[NT][MT][4], struct ring &ring, int groups, bool is_first) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, last = 0;
    uint32_t a[STEPS][NT][4];
    clear(sum);
    for (int group = 0; group < groups; group++) {
        struct stage stage = stage_of(ring, ring.at);
        uint64_t tokens = rows_of_64(shared_address(stage.x));
        uint32_t words[NT][STEPS], scale[NT][2];
        await_phase(ring.full + ring.at, ring.digit);
#pragma unroll
        for (int u = 0; u < NT; u++) {
            int tile = u * WARPS + warp;
            uint4 four = reinterpret_cast<const uint4 *>(stage.words)[tile * WARP + lane];
            uint32_t both = reinterpret_cast<const uint16_t *>(stage.scales)[tile * SCALES + scale_of_lane()];
            words[u][0] = four.x, words[u][1] = four.y, words[u][2] = four.z, words[u][3] = four.w;
            scale[u][0] = scale_pair(both & 0xFF);
            scale[u][1] = scale_pair(both >> 8);
        }
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
#pragma unroll
            for (int u = 0; u < NT; u++) expand(words[u][t], scale[u], a[t][u]);
            begin_products();
#pragma unroll
            for (int u = 0; u < NT; u++)
                multiply_async(reinterpret_cast<float(&)[tiles][4]>(sum[u]), a[t][u], tokens + 2 * t);
            commit_products();
            await_products<BEHIND>();
            if (t == BEHIND - 1 && group > 0 && lane == 0) arrive(ring.empty + last); /* its last products have ended */
        }
        if (is_first && warp < WARPS / 2 && group == least(LAG, groups - 1) && lane == 0) arrive(ring.lag);
        last = ring.at;
        advance(ring);
    }
    await_products<0>();
#pragma unroll
    for (int u = 0; u < NT; u++)
#pragma unroll
        for (int m = 0; m < tiles; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) settle(sum[u][m][c]);
    if (lane == 0) arrive(ring.empty + last);
}

/* Pairs of the tile's tokens: a lane holds those of tokens lane, lane + 32, ... */
struct pairs {
    int of[TOKENS / WARP];
};

DEVICE struct pairs find_pairs(const struct operands &of, const struct tile &tile) {
    struct pairs pairs;
#pragma unroll
    for (int q = 0; q < TOKENS / WARP; q++)
        pairs.of[q] = of.routes.order[tile.first + least((int)threadIdx.x % WARP + q * WARP, tile.count - 1)];
    return pairs;
}

/* Store a row tile; value(m, c) is sum c of tile m of 8 tokens. `own` is the warp's place for results. */
template <class Value>
DEVICE void store_tile(unsigned char *own, const struct pairs &pairs, int count, int row, int width, uint16_t *out, Value value) {
    int lane = (int)threadIdx.x % WARP;
    if (row >= width) return;
#pragma unroll
    for (int q = 0; q < TOKENS / WARP; q++) {
        __syncwarp(); /* the tokens before have been read */
#pragma unroll
        for (int m = 0; m < WARP / 8; m += 2) {
            uint32_t halves[4]; /* rows 0 .. 7 and 8 .. 15 of two tiles */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int from = q * (WARP / 8) + m + i / 2;
                halves[i] = bf16x2_of(value(from, i % 2 * 2), value(from, i % 2 * 2 + 1));
            }
            int token = 8 * (m + lane / 16) + lane % 8;
            store_matrices_transposed(own + token * STORE_STRIDE + lane / 8 % 2 * 16, halves);
        }
        __syncwarp();
#pragma unroll
        for (int p = lane; p < 2 * WARP; p += WARP) {
            int64_t pair = __shfl_sync(FULL_MASK, pairs.of[q], p / 2);
            uint4 eight = *reinterpret_cast<const uint4 *>(own + p / 2 * STORE_STRIDE + p % 2 * 16);
            if (q * WARP + p / 2 < count) *reinterpret_cast<uint4 *>(out + pair * width + row + p % 2 * 8) = eight;
        }
    }
}

/* All of a block: store(sum, factor, own, pairs, count, row) gets the sums of a tile; `row` is the first of the warp's. */
template <int parts, class Store> DEVICE void multiply_all(const struct operands &of, Store store) {
    DYNAMIC_SHARED(unsigned char, shared);
    struct ring ring = begin_ring(shared);
    int warp = (int)threadIdx.x / WARP;
    __syncthreads();
    if (warp >= WARPS) {
        keep_registers<56>();
        copy_all<parts>(ring, of);
        return;
    }
    take_registers<224>();
    bool is_first = true;
    unsigned char *own = ring.shared + STAGES * STAGE_BYTES + warp * STORE_BYTES;
    for (struct work work = {(int)blockIdx.x, 0, {}}; find_work<parts>(work, of);) {
        float sum[NT][MT][4], factor = power_of_two(of.exponents[work.tile.expert] + PRODUCT_EXPONENT);
        struct pairs pairs = find_pairs(of, work.tile);
        if (is_first && warp >= WARPS / 2) await_phase(ring.lag, 0);
        if (work.tile.count > 8 * HALF)
            multiply_tile<MT>(sum, ring, of.groups, is_first);
        else
            multiply_tile<HALF>(sum, ring, of.groups, is_first);
        is_first = false;
        store(sum, factor, own, pairs, work.tile.count, (work.first + warp) * TILE_ROWS);
    }
}

/* As gate_up_few; `num_tiles` is the room in `tiles`. */
KERNEL __launch_bounds__((WARPS + COPIERS) * 32, 1) gate_up_piped(const uint4 *words, const uint4 *scales,
                                                                 const int8_t *exponents, const uint4 *x, const int *order,
                                                                 const int *offsets, const int *tiles, int groups,
                                                                 int width, int top_k, uint16_t *h, int num_tiles) {
    await_earlier();
    struct operands of = {words, scales, exponents, x, {order, offsets, tiles}, groups, width, top_k, num_tiles};
    multiply_all<2>(of, [=](const float (&sum)[NT][MT][4], float factor, unsigned char *own, const struct pairs &pairs, int count,
                            int row) {
        store_tile(own, pairs, count, row, width, h, [&](int m, int c) {
            return swiglu(sum[0][m][c] * factor, sum[1][m][c] * factor);
        });
    });
}

/* As down_few. */
KERNEL __launch_bounds__((WARPS + COPIERS) * 32, 1) down_piped(const uint4 *words, const uint4 *scales, const int8_t *exponents,
                                                              const uint4 *h, const int *order, const int *offsets,
                                                              const int *tiles, int groups, int width, uint16_t *y,
                                                              int num_tiles) {
    await_earlier();
    struct operands of = {words, scales, exponents, h, {order, offsets, tiles}, groups, width, 1, num_tiles};
    multiply_all<1>(of, [=](const float (&sum)[NT][MT][4], float factor, unsigned char *own, const struct pairs &pairs, int count,
                            int row) {
        store_tile(own, pairs, count, row, width, y, [&](int m, int c) { return sum[0][m][c] * factor; });
        store_tile(own, pairs, count, row + WARPS * TILE_ROWS, width, y, [&](int m, int c) { return sum[1][m][c] * factor; });
    });
}
