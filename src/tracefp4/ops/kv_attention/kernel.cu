/* kv_attention on a GPU, decoding and prefill alike. The columns of a matrix product are pairs (query, query head of the
 * group), the rows are 16 tokens; a thread block attends for COLUMNS of them to the pages of one sequence and kv head. Its
 * warps take the tiles of a split in turn, each with copies of its next STAGES - 1 tiles under way.
 *
 * What a sequence gets depends on nothing else: a split has SPLIT tokens whatever the batch is, warps and splits are added
 * in their order, by this kernel or by `combine`, with the same operations. Probabilities are 2^(s - m) with s in units
 * of log2 and m an integer, the largest s seen so far rounded up. So all rescaling is by powers of two and exact, and what
 * a probability is rounded to does not depend on when the largest was seen. Rounded ones are what is summed: the weights of
 * V add up to one, and a token that is seen alone is returned as it is.
 *
 * Operands that 16 bits do not hold are sums of several (QUERY_PARTS, PROBABILITY_PARTS). Queries for FP4 pages are
 * multiplied by a power of two per row that brings the largest to [2^14, 2^15), so none is outside of fp16.
 *
 * Defines: those of pages.cuh; QUERY, `enum dtype`; QUERY_PARTS; PROBABILITY_PARTS; ROUNDS; SPLIT; NT, tiles of 8 columns;
 * WARPS; MIN_BLOCKS, thread blocks that a multiprocessor must have room for; STAGES, at least 2. */

#include "splits.cuh"

/* The queries as B operands, and what turns their products with K into scores in units of log2. */
struct queries {
    uint32_t b[QUERY_PARTS][NT][BLOCKS][2];
    float factor[NT][2];
    int num_visible[NT][2];
    int seen_by_all; /* the tokens that every column sees */
};

/* Two 16-bit numbers, widened. */
DEVICE float2 pair_of(uint32_t two, enum dtype dtype) {
    uint16_t half[2] = {(uint16_t)two, (uint16_t)(two >> 16)};
    return make_float2(float_of(load_bits(half, dtype, 0)), float_of(load_bits(half, dtype, 1)));
}

/* Element i of the queries and the next; i is even. */
DEVICE float2 load_pair(const void *x, int64_t i) {
    if (QUERY == FLOAT32) return static_cast<const float2 *>(x)[i / 2];
    return pair_of(static_cast<const uint32_t *>(x)[i / 2], (enum dtype)QUERY);
}

/* Two numbers in the 16 bits of the pages' products; what they lack stays in x and y. */
DEVICE uint32_t take_part(float &x, float &y) {
    uint32_t part = IS_FP4 ? f16x2_of(x, y) : bf16x2_of(x, y);
    float2 found = pair_of(part, IS_FP4 ? FLOAT16 : BFLOAT16);
    x -= found.x;
    y -= found.y;
    return part;
}

DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (IS_FP4)
        mma_f16(c, a, b0, b1);
    else
        mma_bf16(c, a, b0, b1);
}

/* Where row (sequence, query, head) of queries and output begins. */
DEVICE int64_t row_of(const struct problem &problem, int sequence, int kv_head, int column) {
    int64_t query = (int64_t)sequence * problem.num_queries + column / problem.group;
    return (query * problem.num_kv + kv_head) * ((int64_t)problem.group * HEAD_DIM) +
           column % problem.group * HEAD_DIM;
}

/* How many tokens a column sees: those up to its own. */
DEVICE int visible(const struct problem &problem, int sequence, int column, int page_tokens) {
    if (column >= problem.num_columns) return 0;
    int64_t position = problem.positions[(int64_t)sequence * problem.num_queries + column / problem.group];
    if (position < 0 || position >= (int64_t)problem.num_pages * page_tokens) stop_here();
    return (int)position + 1;
}

/* Load what the columns see; returns the tokens that any of them sees. */
DEVICE int load_visible(struct queries &queries, const struct problem &problem, int sequence, int first, int page_tokens) {
    int j = (int)threadIdx.x % 4, most_of_all = 0, least_of_all = 0x7FFFFFFF;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int column = first + 8 * n + 2 * j + i, tokens = visible(problem, sequence, column, page_tokens);
            queries.num_visible[n][i] = tokens;
            most_of_all = most(most_of_all, tokens);
            if (column < problem.num_columns) least_of_all = least(least_of_all, tokens);
        }
    least_of_all = least(least_of_all, __shfl_xor_sync(FULL_MASK, least_of_all, 1));
    queries.seen_by_all = least(least_of_all, __shfl_xor_sync(FULL_MASK, least_of_all, 2));
    most_of_all = most(most_of_all, __shfl_xor_sync(FULL_MASK, most_of_all, 1));
    return most(most_of_all, __shfl_xor_sync(FULL_MASK, most_of_all, 2));
}

DEVICE void load_queries(struct queries &queries, const struct problem &problem, int sequence, int kv_head, int first,
                         int key_exponent, float scale) {
    int lane = (int)threadIdx.x % WARP, g = lane / 4, j = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int column = first + 8 * n + g, is_there = column < problem.num_columns;
        int64_t row = is_there ? row_of(problem, sequence, kv_head, column) : 0;
        int32_t largest = 0;
#pragma unroll
        for (int i = 0; IS_FP4 && i < 2 * BLOCKS; i++) {
            float2 two = load_pair(problem.queries, row + 8 * i + 2 * j);
            largest = most(largest, most((int32_t)(bits_of(two.x) & MAGNITUDE_BITS), (int32_t)(bits_of(two.y) & MAGNITUDE_BITS)));
        }
        largest = most(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
        largest = most(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
        int shift = IS_FP4 ? least(14 + 127 - (largest >> 23), 127) : 0;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) {
            float2 two = load_pair(problem.queries, row + 8 * i + 2 * j);
            float x = is_there ? two.x * power_of_two(shift) : 0.0f, y = is_there ? two.y * power_of_two(shift) : 0.0f;
#pragma unroll
            for (int part = 0; part < QUERY_PARTS; part++) queries.b[part][n][i / 2][i % 2] = take_part(x, y);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int exponent = CODE_EXPONENT + key_exponent - __shfl_sync(FULL_MASK, shift, 4 * (2 * j + i));
            /* beyond these all scores are next to 0, or so far apart that one of them has all the weight */
            queries.factor[n][i] = power_of_two(most(-122, least(exponent, 127))) * scale;
        }
    }
}

/* Raise m where a score lies above it, and rescale what was added under the old one. */
DEVICE void raise(struct sums &sums, const float (&score)[NT][4]) {
    int rises = 0;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) rises |= fmaxf(score[n][i], score[n][2 + i]) > sums.m[n][i];
    if (!__any_sync(FULL_MASK, rises)) return;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = fmaxf(score[n][i], score[n][2 + i]);
            for (int with = 4; with < WARP; with *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, with));
            float m = fmaxf(sums.m[n][i], ceilf(top)), factor = power_below_one(sums.m[n][i] - m);
            sums.m[n][i] = m;
            sums.l[n][i] *= factor;
#pragma unroll
            for (int k = 0; k < BLOCKS; k++) {
                sums.o[n][k][i] *= factor;
                sums.o[n][k][2 + i] *= factor;
            }
        }
}

/* Take from every column the tokens that it does not see, of a tile that begins at `token`. */
DEVICE void hide(float (&score)[NT][4], const struct queries &queries, int token) {
    int g = (int)threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (token + g + 8 * (c / 2) >= queries.num_visible[n][c % 2]) score[n][c] = -float_of(INF_BITS);
}

/* Add the tokens of one tile, which begin at `token`. */
DEVICE void add_tile(struct sums &sums, const struct queries &queries, const uint8_t *tile, int token) {
    int lane = (int)threadIdx.x % WARP;
    float score[NT][4] = {};
    for_keys(tile, lane, [&](int k, const uint32_t(&a)[4]) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int part = 0; part < QUERY_PARTS; part++)
                multiply(score[n], a, queries.b[part][n][k][0], queries.b[part][n][k][1]);
    });
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) score[n][c] *= queries.factor[n][c % 2];
    if (token + TILE > queries.seen_by_all) hide(score, queries, token);
    raise(sums, score);
    uint32_t b[PROBABILITY_PARTS][NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = exp2_fast(score[n][2 * half] - (sums.m[n][0] - (float)LIFT));
            float y = exp2_fast(score[n][2 * half + 1] - (sums.m[n][1] - (float)LIFT));
            if (ROUNDS) {
                uint32_t rounded = bf16x2_of(x, y);
                x = float_of(rounded << 16);
                y = float_of(rounded & 0xFFFF0000u);
            }
            sums.l[n][0] += x;
            sums.l[n][1] += y;
#pragma unroll
            for (int part = 0; part < PROBABILITY_PARTS; part++) b[part][n][half] = transpose_8x8(take_part(x, y));
        }
    for_values(tile + PART_BYTES, lane, [&](int k, const uint32_t(&a)[4]) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int part = 0; part < PROBABILITY_PARTS; part++)
                multiply(sums.o[n][k], a, b[part][n][0], b[part][n][1]);
    });
}

DEVICE void store_result(const struct problem &problem, int64_t i, float o, float l, int value_exponent) {
    float x = o / l * power_of_two(CODE_EXPONENT) * power_of_two(value_exponent);
    if (QUERY == FLOAT32)
        static_cast<float *>(problem.out)[i] = x;
    else
        static_cast<uint16_t *>(problem.out)[i] = (uint16_t)(QUERY == BFLOAT16 ? bf16x2_of(x, x) : f16x2_of(x, x));
}

/* Grid: sequences times kv heads; tiles of columns; groups of `block_splits` splits, which a block takes in turn. Where
 * there is one group, the block adds them up and `partial` is null. */
KERNEL __launch_bounds__(WARPS * 32, MIN_BLOCKS) attend(const void *query_rows, const uint8_t *keys, const uint8_t *key_scales,
                                            const uint8_t *values, const uint8_t *value_scales, const int64_t *table,
                                            const int64_t *positions, void *out, float *partial, float *partial_sums,
                                            int num_queries, int group, int num_kv, int num_pages, int num_splits,
                                            int block_splits, int num_frames, int tiles_per_page, int key_exponent,
                                            int value_exponent, float scale) {
    await_earlier();
    DYNAMIC_SHARED(uint8_t, shared);
    struct merged &merged = *reinterpret_cast<struct merged *>(shared + WARPS * STAGES * TILE_BYTES);
    struct problem problem = {query_rows, table, positions, out, partial, partial_sums, num_queries, group,
                              num_kv, num_pages, num_splits, num_queries * group};
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, first = (int)blockIdx.y * COLUMNS;
    int sequence = (int)blockIdx.x / num_kv, kv_head = (int)blockIdx.x % num_kv;
    struct pages pages =
        pages_of(keys, key_scales, values, value_scales, (int64_t)kv_head * num_frames * tiles_per_page, lane);
    struct queries queries;
    int num_tokens = load_visible(queries, problem, sequence, first, tiles_per_page * TILE);
    int num_tiles = (num_tokens + TILE - 1) / TILE, split = (int)blockIdx.z * block_splits;
    int last = least(split + block_splits, (num_tiles + SPLIT_TILES - 1) / SPLIT_TILES);
    if (split * SPLIT_TILES >= num_tiles) return; /* `combine` does not read it either */
    if ((int)threadIdx.x < COLUMNS) {
        merged.total_m[threadIdx.x] = LOWEST;
        merged.total_l[threadIdx.x] = 0.0f;
        merged.num_visible[threadIdx.x] =
            visible(problem, sequence, first + (int)threadIdx.x, tiles_per_page * TILE);
    }
    int end = least(last * SPLIT_TILES, num_tiles), next = split * SPLIT_TILES + warp;
    const int64_t *frames = table + (int64_t)sequence * num_pages;
    /* the number of the tile that is the lane's among those of the warp in a split */
    auto number_in = [&](int of_split) {
        int tile = of_split * SPLIT_TILES + warp + WARPS * lane;
        if (lane >= SHARE || tile >= end) return 0u;
        uint32_t page = (uint32_t)tile / (uint32_t)tiles_per_page;
        int64_t frame = frames[page];
        if ((uint64_t)frame >= (uint64_t)num_frames) stop_here();
        return (uint32_t)(frame * tiles_per_page) + tile - page * tiles_per_page;
    };
    uint32_t numbers = number_in(split), later = number_in(split + 1);
    uint8_t *ring = shared + warp * STAGES * TILE_BYTES;
    shared_place own = place_in_shared(ring + own_place(lane));
    auto copy_next = [&](int to) {
        int among = (uint32_t)next / WARPS % SHARE;
        if (next < end) copy_tile(own + to, pages, __shfl_sync(FULL_MASK, numbers, among), lane);
        commit_copies();
        next += WARPS;
        if (among < SHARE - 1) return;
        numbers = later; /* looked up a split ahead of its use */
        later = number_in(next / SPLIT_TILES + 1);
    };
    for (int s = 0; s < STAGES - 1; s++) copy_next(s * TILE_BYTES);
    load_queries(queries, problem, sequence, kv_head, first, key_exponent, scale); /* while tiles are under way */
    for (int current = 0, read = (STAGES - 1) * TILE_BYTES; split < last; split++) {
        struct sums sums = {};
#pragma unroll
        for (int n = 0; n < NT; n++) sums.m[n][0] = sums.m[n][1] = LOWEST;
        for (int t = split * SPLIT_TILES + warp; t < least((split + 1) * SPLIT_TILES, num_tiles); t += WARPS) {
            await_copies<STAGES - 2>();
            __syncwarp(); /* the tile is there for all lanes, and nobody reads the one before it */
            copy_next(read);
            add_tile(sums, queries, ring + current, t * TILE);
            read = current;
            current = current + TILE_BYTES == STAGES * TILE_BYTES ? 0 : current + TILE_BYTES;
        }
        merge_split(merged, sums, problem, split, first);
    }
    await_copies<0>();
    if (partial) return;
    for (int i = (int)threadIdx.x; i < COLUMNS * HEAD_DIM; i += THREADS) {
        int column = i / HEAD_DIM, d = i % HEAD_DIM;
        if (first + column >= problem.num_columns) return;
        store_result(problem, row_of(problem, sequence, kv_head, first + column) + d, merged.total[column][d],
                     merged.total_l[column], value_exponent);
    }
}

/* Add the splits in their order: a block per column, a thread per dim. Grid: sequences times kv heads; columns. */
KERNEL combine(const float *partial, const float *partial_sums, const int64_t *positions, void *out, int num_queries,
               int group, int num_kv, int num_splits, int value_exponent) {
    await_earlier();
    struct problem problem = {nullptr, nullptr, positions, out, nullptr, nullptr, num_queries, group,
                              num_kv, 0, num_splits, num_queries * group};
    int sequence = (int)blockIdx.x / num_kv, kv_head = (int)blockIdx.x % num_kv, column = (int)blockIdx.y;
    int d = (int)threadIdx.x;
    int64_t position = positions[(int64_t)sequence * num_queries + column / group];
    float total = 0.0f, total_l = 0.0f, total_m = LOWEST;
    for (int split = 0; split <= (int)(position / SPLIT); split++) {
        int64_t at = ((int64_t)blockIdx.x * num_splits + split) * problem.num_columns + column;
        float m = partial_sums[2 * at], l = partial_sums[2 * at + 1];
        total = folded(total, total_m, partial[at * HEAD_DIM + d], m);
        total_l = folded(total_l, total_m, l, m);
        total_m = fmaxf(total_m, m);
    }
    store_result(problem, row_of(problem, sequence, kv_head, column) + d, total, total_l, value_exponent);
}
