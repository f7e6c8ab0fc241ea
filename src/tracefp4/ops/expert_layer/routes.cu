/* Which tokens go to which expert, and back: pairs (token, slot) are numbered token * top_k + slot, sorted by expert, equal
 * ones in the order of their numbers, and cut into tiles of tokens. A thread block per expert looks at all pairs; nothing
 * is added atomically, so every run gives the same lists. Pairs whose id is no expert's are in no list. */

#include "device.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* The sum over the block of one number per thread. */
DEVICE int sum_of_block(int mine) {
    SHARED int of_warp[WARPS];
    for (int with = 16; with; with /= 2) mine += __shfl_xor_sync(FULL_MASK, mine, with);
    __syncthreads(); /* the last sum has been read */
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = mine;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < WARPS; w++) total += of_warp[w];
    return total;
}

/* counts[expert] of every expert; one block each. */
KERNEL __launch_bounds__(256) count_pairs(const int64_t *ids, int num_pairs, int *counts) {
    int found = 0;
    for (int p = (int)threadIdx.x; p < num_pairs; p += THREADS) found += ids[p] == (int64_t)blockIdx.x;
    found = sum_of_block(found);
    if (threadIdx.x == 0) counts[blockIdx.x] = found;
}

/* Everything that the lists say about one expert; the last one also ends the lists. */
KERNEL __launch_bounds__(256) place_pairs(const int64_t *ids, int num_pairs, const int *counts, int tile_tokens,
                                          int max_tiles, int *order, int *offsets, int *tiles) {
    SHARED int of_warp[2][WARPS];
    int expert = (int)blockIdx.x, thread = (int)threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int pairs_before = 0, tiles_before = 0;
    for (int e = thread; e < expert; e += THREADS) {
        pairs_before += counts[e];
        tiles_before += (counts[e] + tile_tokens - 1) / tile_tokens;
    }
    pairs_before = sum_of_block(pairs_before);
    tiles_before = sum_of_block(tiles_before);
    int count = counts[expert], num_tiles = (count + tile_tokens - 1) / tile_tokens;
    for (int i = thread; i < num_tiles; i += THREADS) {
        tiles[2 * (tiles_before + i)] = expert;
        tiles[2 * (tiles_before + i) + 1] = pairs_before + i * tile_tokens;
    }
    if (thread == 0) offsets[expert] = pairs_before;
    if (expert == (int)gridDim.x - 1) {
        if (thread == 0) offsets[expert + 1] = pairs_before + count;
        for (int i = tiles_before + num_tiles + thread; i < max_tiles; i += THREADS) tiles[2 * i] = -1;
    }
    for (int start = 0, side = 0; start < num_pairs; start += THREADS, side ^= 1) {
        int pair = start + thread, is_mine = pair < num_pairs && ids[pair] == (int64_t)expert;
        uint32_t ballot = __ballot_sync(FULL_MASK, is_mine);
        if (lane == 0) of_warp[side][warp] = __popc(ballot);
        __syncthreads(); /* one a turn is enough: the next turn writes the other side */
        int at = pairs_before + __popc(ballot & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            at += w < warp ? of_warp[side][w] : 0;
            pairs_before += of_warp[side][w];
        }
        if (is_mine) order[at] = pair;
    }
}

/* out[t] = R(sum over slots, in their order, of weight * y[pair]); NaN where an id is no expert's. A block has a token, a
 * thread eight columns at a time. */
KERNEL __launch_bounds__(256) combine(const uint16_t *y, const int64_t *ids, const void *weights, int weights_dtype,
                                      int num_experts, int top_k, int width, uint16_t *out) {
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
