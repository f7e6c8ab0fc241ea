/* Which tokens go to which expert, and back: pairs (token, slot) are numbered token * top_k + slot, sorted by expert, equal
 * ones in the order of their numbers, and cut into tiles of tokens. A thread block takes a chunk of the pairs, each of its
 * warps a part of that. What is added atomically are whole numbers, and only their sums are used, so every run gives the same
 * lists. Pairs whose id is no expert's are in no list. */

#include "device.cuh"

enum { THREADS = 256, WARPS = THREADS / WARP };

/* The expert of a pair before `end`, or -1. */
DEVICE int expert_of(const int64_t *ids, int pair, int end, int num_experts) {
    int64_t id = pair < end ? ids[pair] : -1;
    return id >= 0 && id < num_experts ? (int)id : -1;
}

/* The sum over the threads before this one. */
DEVICE int sum_before(int mine) {
    SHARED int of_warp[WARPS];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, before = mine;
    for (int by = 1; by < WARP; by *= 2) {
        int other = __shfl_up_sync(FULL_MASK, before, by);
        before += lane >= by ? other : 0;
    }
    __syncthreads(); /* the last sums have been read */
    if (lane == WARP - 1) of_warp[warp] = before;
    __syncthreads();
    before -= mine;
    for (int w = 0; w < warp; w++) before += of_warp[w];
    return before;
}

/* counts[chunk][expert]. */
KERNEL __launch_bounds__(THREADS) count_pairs(const int64_t *ids, int num_pairs, int chunk, int num_experts, int *counts) {
    await_earlier();
    DYNAMIC_SHARED(int, found);
    int begin = (int)blockIdx.x * chunk, end = least(begin + chunk, num_pairs);
    for (int e = (int)threadIdx.x; e < num_experts; e += THREADS) found[e] = 0;
    __syncthreads();
    for (int p = begin + (int)threadIdx.x; p < end; p += THREADS) {
        int expert = expert_of(ids, p, end, num_experts);
        if (expert >= 0) atomicAdd(&found[expert], 1);
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < num_experts; e += THREADS) counts[(int64_t)blockIdx.x * num_experts + e] = found[e];
}

/* Where the lists begin, in shared memory. */
struct lists {
    int *next;        /* [warp][expert]: where the warp puts the expert's next pair */
    int *first, *sum; /* [expert]: its first pair, and how many it has */
    int *first_tile;
};

/* Fill in the lists, from the pairs that each warp has of each expert in `next`. */
DEVICE void begin_lists(const struct lists &lists, const int *counts, int num_experts, int tile_tokens) {
    int part = (num_experts + THREADS - 1) / THREADS, from = least((int)threadIdx.x * part, num_experts);
    int to = least(from + part, num_experts), pairs = 0, tiles = 0;
    for (int e = from; e < to; e++) {
        int before = 0, sum = 0;
        if (counts)
            for (int c = 0; c < (int)gridDim.x; c++) {
                int found = counts[(int64_t)c * num_experts + e];
                before += c < (int)blockIdx.x ? found : 0;
                sum += found;
            }
        else
            for (int w = 0; w < WARPS; w++) sum += lists.next[w * num_experts + e];
        lists.first[e] = before; /* of this expert's pairs, in earlier chunks */
        lists.sum[e] = sum;
        pairs += sum;
        tiles += (sum + tile_tokens - 1) / tile_tokens;
    }
    pairs = sum_before(pairs);
    tiles = sum_before(tiles);
    for (int e = from; e < to; e++) {
        int at = pairs + lists.first[e];
        for (int w = 0; w < WARPS; w++) {
            int found = lists.next[w * num_experts + e];
            lists.next[w * num_experts + e] = at;
            at += found;
        }
        lists.first[e] = pairs;
        lists.first_tile[e] = tiles;
        pairs += lists.sum[e];
        tiles += (lists.sum[e] + tile_tokens - 1) / tile_tokens;
    }
}

/* Write offsets and tiles; warps of all thread blocks share the experts. */
DEVICE void write_tiles(const struct lists &lists, int num_experts, int tile_tokens, int max_tiles, int *offsets,
                        int *tiles) {
    int lane = (int)threadIdx.x % WARP, warp = (int)(blockIdx.x * WARPS + threadIdx.x / WARP), last = num_experts - 1;
    for (int e = warp; e < num_experts; e += (int)gridDim.x * WARPS) {
        if (lane == 0) offsets[e] = lists.first[e];
        for (int i = lane; i * tile_tokens < lists.sum[e]; i += WARP) {
            tiles[2 * (lists.first_tile[e] + i)] = e;
            tiles[2 * (lists.first_tile[e] + i) + 1] = lists.first[e] + i * tile_tokens;
        }
    }
    int used = lists.first_tile[last] + (lists.sum[last] + tile_tokens - 1) / tile_tokens;
    if (warp == 0 && lane == 0) offsets[num_experts] = lists.first[last] + lists.sum[last];
    for (int i = used + warp * WARP + lane; i < max_tiles; i += (int)gridDim.x * THREADS) tiles[2 * i] = -1;
}

/* A chunk of the pairs into the lists. `counts` is what count_pairs left, or null where one chunk holds all pairs. */
KERNEL __launch_bounds__(THREADS) place_pairs(const int64_t *ids, int num_pairs, int chunk, int num_experts,
                                              const int *counts, int tile_tokens, int max_tiles, int *order, int *offsets,
                                              int *tiles) {
    await_earlier();
    DYNAMIC_SHARED(int, shared);
    struct lists lists = {shared, shared + WARPS * num_experts, shared + (WARPS + 1) * num_experts,
                          shared + (WARPS + 2) * num_experts};
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int begin = (int)blockIdx.x * chunk + warp * (chunk / WARPS), end = least(begin + chunk / WARPS, num_pairs);
    int *next = lists.next + warp * num_experts;
    for (int i = (int)threadIdx.x; i < WARPS * num_experts; i += THREADS) shared[i] = 0;
    __syncthreads();
    for (int p = begin + lane; p < end; p += WARP) {
        int expert = expert_of(ids, p, end, num_experts);
        if (expert >= 0) atomicAdd(&next[expert], 1);
    }
    __syncthreads();
    begin_lists(lists, counts, num_experts, tile_tokens);
    __syncthreads();
    for (int start = begin; start < end; start += WARP) {
        int expert = expert_of(ids, start + lane, end, num_experts);
        uint32_t same = __match_any_sync(FULL_MASK, expert), earlier = same & ((1u << lane) - 1);
        if (expert >= 0) order[next[expert] + __popc(earlier)] = start + lane;
        __syncwarp(); /* all have read where their pairs go */
        if (expert >= 0 && !earlier) next[expert] += __popc(same);
        __syncwarp();
    }
    write_tiles(lists, num_experts, tile_tokens, max_tiles, offsets, tiles);
}

/* out[t] = R(sum over slots, in their order, of weight * y[pair]); NaN where an id is no expert's. A block has a token, a
 * thread eight columns at a time. */
KERNEL __launch_bounds__(256) combine(const uint16_t *y, const int64_t *ids, const void *weights, int weights_dtype,
                                      int num_experts, int top_k, int width, uint16_t *out) {
    await_earlier();
    int64_t token = blockIdx.x;
    for (int column = 8 * (int)threadIdx.x; column < width; column += 8 * THREADS) {
        float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        int is_routed = 1;
        for (int slot = 0; slot < top_k; slot++) {
            int64_t pair = token * top_k + slot;
            is_routed &= ids[pair] >= 0 && ids[pair] < num_experts;
            float weight = float_of(load_bits(weights, (enum dtype)weights_dtype, pair));
            uint4 eight = load_once(reinterpret_cast<const uint4 *>(y + pair * width + column));
            const uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
            for (int i = 0; i < 4; i++) {
                sum[2 * i] += weight * float_of(two[i] << 16);
                sum[2 * i + 1] += weight * float_of(two[i] & 0xFFFF0000u);
            }
        }
        uint32_t both[4];
        for (int i = 0; i < 8; i++) sum[i] = is_routed ? sum[i] : float_of(NAN_BITS);
        for (int i = 0; i < 4; i++) both[i] = bf16x2_of(sum[2 * i], sum[2 * i + 1]);
        *reinterpret_cast<uint4 *>(out + token * width + column) = make_uint4(both[0], both[1], both[2], both[3]);
    }
}
