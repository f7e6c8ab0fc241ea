/* Logits and the weights of their tiles. For few rows a thread block multiplies TILE rows of the head by TOKENS hidden
 * states; both pass through shared memory in stages of DEPTH columns, of which STAGES - 1 are under way, and the head is the A
 * operand. For many rows a library multiplies, and only weights are left to find. */

#include "tiles.cuh"

enum {
    TOKENS = 16,
    DEPTH = 64,
    STAGES = 4,
    WARPS = 4,
    THREADS = WARP * WARPS,
    WARP_ROWS = TILE / WARPS,
    ROW_FRAGMENTS = WARP_ROWS / 16,
    TOKEN_FRAGMENTS = TOKENS / 8,
    CHUNKS = DEPTH / 8, /* of 16 bytes, in a row of a stage */
    STAGE = (TILE + TOKENS) * CHUNKS,
    PADDED = TILE + 8,  /* logits from one token to the next in shared memory */
    EIGHTS = TILE / 8,  /* of logits, in a tile */
    GROUPS = EIGHTS * TOKENS / THREADS, /* of eight logits, that a thread weighs of the tile of one token */
    TURNS = 4           /* tiles that a thread weighs its eight logits of, where logits are in memory */
};

/* Where chunk c of row r lies: rows are turned against each other, so that eight rows of one chunk meet all banks. */
DEVICE int place_of(int r, int c) { return r * CHUNKS + (c ^ (r % CHUNKS)); }

/* Rows first .. first + count - 1 of a matrix of `num_rows`, DEPTH columns from `column`; zeros beyond either end. */
DEVICE void copy_rows(uint4 *to, const uint16_t *from, int count, int first, int num_rows, int column, int width) {
    for (int i = (int)threadIdx.x; i < count * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS, is_there = first + r < num_rows && column + 8 * c < width;
        const uint16_t *at = from + (is_there ? (int64_t)(first + r) * width + column + 8 * c : 0);
        copy_async(to + place_of(r, c), at, is_there);
    }
}

DEVICE void multiply_stage(const uint4 *head, const uint4 *hidden, float (&sum)[ROW_FRAGMENTS][TOKEN_FRAGMENTS][4]) {
    int warp = (int)threadIdx.x / WARP, matrix = (int)threadIdx.x % WARP / 8, line = (int)threadIdx.x % 8;
    int row = warp * WARP_ROWS;
    for (int k = 0; k < CHUNKS; k += 2) {
        uint32_t a[ROW_FRAGMENTS][4], b[4];
        for (int m = 0; m < ROW_FRAGMENTS; m++)
            load_matrices(a[m], head + place_of(row + 16 * m + 8 * (matrix % 2) + line, k + matrix / 2));
        for (int n = 0; n < TOKEN_FRAGMENTS; n += 2) {
            load_matrices(b, hidden + place_of(8 * (n + matrix / 2) + line, k + matrix % 2));
            for (int m = 0; m < ROW_FRAGMENTS; m++) {
                mma_bf16(sum[m][n], a[m], b[0], b[1]);
                mma_bf16(sum[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* Eight logits as floats. */
struct eight {
    float logit[8];
};

DEVICE struct eight unpacked(uint4 words) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    struct eight eight;
    for (int i = 0; i < 8; i++) eight.logit[i] = float_of_bf16(word[i / 2] >> 16 * (i % 2) & 0xFFFF);
    return eight;
}

/* The weights of a tile, of which a thread has `groups` times eight logits: the sharers of a tile are 16 / groups lanes, and
 * sharer s has group s + e * sharers as entry e. Sums of eight are added as a tree over the tile, however it is shared. */
template <int groups> DEVICE struct weights weigh(const uint4 (&words)[groups], float sharpness) {
    struct weights found = {MINUS_INFINITY, 0.0f};
    struct eight group[groups];
    float sum[groups];
    for (int e = 0; e < groups; e++) {
        group[e] = unpacked(words[e]);
        for (int i = 0; i < 8; i++)
            found.largest = group[e].logit[i] > found.largest ? group[e].logit[i] : found.largest;
    }
    for (int with = EIGHTS / groups / 2; with; with /= 2) {
        float other = __shfl_xor_sync(FULL_MASK, found.largest, with);
        found.largest = other > found.largest ? other : found.largest;
    }
    float largest = found.largest == MINUS_INFINITY ? 0.0f : found.largest;
    for (int e = 0; e < groups; e++) {
        sum[e] = 0.0f;
        for (int i = 0; i < 8; i++) sum[e] += exp2_fast((group[e].logit[i] - largest) * sharpness);
    }
    for (int n = groups / 2; n; n /= 2)
        for (int e = 0; e < n; e++) sum[e] += sum[e + n];
    for (int with = EIGHTS / groups / 2; with; with /= 2) sum[0] += __shfl_xor_sync(FULL_MASK, sum[0], with);
    found.sum = sum[0];
    return found;
}

/* logits [num_tokens, gridDim.y * TILE], weights [num_tokens, gridDim.y]; blockIdx is (tokens, vocabulary), so that
 * blocks which read the same rows of the head run side by side. */
KERNEL __launch_bounds__(THREADS) multiply_head(const uint16_t *head, const uint16_t *hidden, const double *temperature,
                                                int num_tokens, int vocabulary, int width, uint16_t *logits,
                                                struct weights *weights) {
    await_earlier();
    DYNAMIC_SHARED(uint4, shared);
    int first_row = (int)blockIdx.y * TILE, first_token = (int)blockIdx.x * TOKENS;
    int num_steps = (width + DEPTH - 1) / DEPTH;
    float sum[ROW_FRAGMENTS][TOKEN_FRAGMENTS][4];
    for (int m = 0; m < ROW_FRAGMENTS; m++)
        for (int n = 0; n < TOKEN_FRAGMENTS; n++)
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;
    for (int step = 1 - STAGES; step < num_steps; step++) {
        if (step >= 0) {
            await_copies<STAGES - 2>();
            __syncthreads(); /* this step has arrived, and the last one has been read */
        }
        int next = step + STAGES - 1;
        if (next < num_steps) {
            uint4 *to = shared + next % STAGES * STAGE;
            copy_rows(to, head, TILE, first_row, vocabulary, next * DEPTH, width);
            copy_rows(to + TILE * CHUNKS, hidden, TOKENS, first_token, num_tokens, next * DEPTH, width);
        }
        commit_copies();
        const uint4 *from = shared + (step + STAGES) % STAGES * STAGE;
        if (step >= 0) multiply_stage(from, from + TILE * CHUNKS, sum);
    }
    await_copies<0>();
    __syncthreads();
    uint16_t *tile = reinterpret_cast<uint16_t *>(shared);
    int thread = (int)threadIdx.x, warp = thread / WARP, g = thread % WARP / 4, j = thread % 4;
    for (int m = 0; m < ROW_FRAGMENTS; m++)
        for (int n = 0; n < TOKEN_FRAGMENTS; n++)
            for (int i = 0; i < 4; i++) {
                int row = warp * WARP_ROWS + 16 * m + g + 8 * (i / 2), token = 8 * n + 2 * j + i % 2;
                float logit = first_row + row < vocabulary ? sum[m][n][i] : MINUS_INFINITY;
                tile[token * PADDED + row] = (uint16_t)bf16x2_of(logit, 0.0f);
            }
    __syncthreads();
    int64_t tiles = gridDim.y, at = blockIdx.y;
    for (int i = thread; i < TOKENS * (TILE / 8); i += THREADS) {
        int token = i / (TILE / 8), c = i % (TILE / 8);
        if (first_token + token >= num_tokens) break;
        uint4 *to = reinterpret_cast<uint4 *>(logits + ((first_token + token) * tiles + at) * TILE) + c;
        *to = reinterpret_cast<const uint4 *>(tile + token * PADDED)[c];
    }
    int sharers = EIGHTS / GROUPS, token = thread / sharers, is_there = first_token + token < num_tokens;
    uint4 words[GROUPS];
    for (int e = 0; e < GROUPS; e++)
        words[e] = reinterpret_cast<const uint4 *>(tile + token * PADDED)[thread % sharers + e * sharers];
    struct weights found = weigh(words, sharpness_of(is_there ? temperature[first_token + token] : 1.0));
    if (is_there && thread % sharers == 0) weights[(first_token + token) * tiles + at] = found;
}

/* Minus infinity for those of eight logits that lie beyond the first `num`. */
DEVICE uint4 excluded_from(uint4 words, int num) {
    uint32_t word[4] = {words.x, words.y, words.z, words.w};
    for (int i = 0; i < 8; i++)
        if (i >= num) word[i / 2] = i % 2 ? (word[i / 2] & 0xFFFF) | 0xFF800000u : (word[i / 2] & 0xFFFF0000u) | 0xFF80;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* The weights of logits [gridDim.x, num_tiles * TILE] that a product has left, and minus infinity beyond the vocabulary. A
 * block takes a strip of a row; the last strips come first, since the product has written them last and they may still be
 * in the cache. */
KERNEL __launch_bounds__(THREADS) weigh_tiles(const double *temperature, int num_tiles, int vocabulary, uint16_t *logits,
                                              struct weights *weights) {
    await_earlier();
    enum { SIDE_BY_SIDE = THREADS / EIGHTS };
    int64_t row = blockIdx.x;
    int thread = (int)threadIdx.x, strip = (int)(gridDim.y - 1 - blockIdx.y);
    int first = strip * SIDE_BY_SIDE * TURNS + thread / EIGHTS;
    uint4 *own = reinterpret_cast<uint4 *>(logits + row * num_tiles * TILE) + thread % EIGHTS;
    uint4 words[TURNS];
    for (int turn = 0; turn < TURNS; turn++) {
        int tile = first + turn * SIDE_BY_SIDE;
        words[turn] = tile < num_tiles ? load_once(own + tile * EIGHTS) : make_uint4(0, 0, 0, 0);
    }
    float sharpness = sharpness_of(temperature[row]);
    for (int turn = 0; turn < TURNS; turn++) {
        int tile = first + turn * SIDE_BY_SIDE, left = vocabulary - tile * TILE - 8 * (thread % EIGHTS);
        uint4 eight[1] = {words[turn]};
        if (left < 8 && tile < num_tiles) own[tile * EIGHTS] = eight[0] = excluded_from(eight[0], left);
        struct weights found = weigh(eight, sharpness);
        if (tile < num_tiles && thread % EIGHTS == 0) weights[row * num_tiles + tile] = found;
    }
}
