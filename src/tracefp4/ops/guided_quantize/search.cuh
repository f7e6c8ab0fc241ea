/* The cheapest set of flips that explains the difference of two syndromes, found by a warp; search.py is the definition.
 *
 * The warp ranks the candidates together. Sets grow one candidate at a time, the same in all lanes, and every lane tries
 * another one for the last place but one: the last column is then known, and looked for. */

#ifndef TRACEFP4_SEARCH_CUH
#define TRACEFP4_SEARCH_CUH

#include "keys.h"
#include "syndromes.cuh"

#define NEVER 0x7FFFFFFFFFFFFFFFll
enum { RANK_BITS = 6, RANK_MASK = (1 << RANK_BITS) - 1 };

/* The candidates of a block, nearest first; in shared memory, one for each warp. */
struct ranking {
    uint64_t column[MAX_CANDIDATES];
    int64_t cost[MAX_CANDIDATES];
    int32_t key[MAX_CANDIDATES];
    uint32_t filter[8]; /* the bit of every column's hash: most differences that no last flip explains have none */
};

/* The best set so far; the same in all lanes. */
struct flips {
    int num;
    int64_t cost;
    uint64_t ranks; /* RANK_BITS each, the last one lowest */
};

DEVICE int rank_at(const struct flips &flips, int f) {
    return (int)(flips.ranks >> RANK_BITS * (flips.num - 1 - f)) & RANK_MASK;
}

DEVICE int64_t of_lane(int64_t value, int source) {
    uint32_t low = __shfl_sync(FULL_MASK, (uint32_t)value, source);
    return (int64_t)(low | (uint64_t)__shfl_sync(FULL_MASK, (uint32_t)((uint64_t)value >> 32), source) << 32);
}

/* Sort the first code.num_candidates of the keys that the lanes hold, which all differ; returns how many there are. */
template <int num_keys> DEVICE int rank(const struct code &code, const int32_t (&key)[num_keys], struct ranking *ranking) {
    int lane = (int)threadIdx.x % WARP, num = 0;
    __syncwarp(); /* nobody reads the last ranking any more */
    if (lane < 8) ranking->filter[lane] = 0;
    for (int32_t last = -1; num < code.num_candidates; num++) {
        int32_t mine = NO_CANDIDATE;
        for (int i = 0; i < num_keys; i++)
            if (key[i] > last) mine = least(mine, key[i]);
        last = __reduce_min_sync(FULL_MASK, mine);
        if (last == NO_CANDIDATE) break;
        if (lane == 0) ranking->key[num] = last;
    }
    __syncwarp();
    for (int i = lane; i < num; i += WARP) {
        int64_t distance = ranking->key[i] >> INDEX_BITS;
        uint64_t column = (uint64_t)code.column[ranking->key[i] & ((1 << INDEX_BITS) - 1)];
        ranking->cost[i] = distance * distance;
        ranking->column[i] = column;
        atomicOr(ranking->filter + (hash(column) >> 5), 1u << (hash(column) & 31));
    }
    __syncwarp();
    return num;
}

/* Complete the chosen candidates by one or two at `from` or later, if that beats the best set. */
DEVICE void complete(const struct ranking *ranking, int num, int left, int from, const struct flips &chosen,
                     uint64_t difference, struct flips *best) {
    for (int first = from; first + left <= num; first += WARP) {
        int i = first + (int)threadIdx.x % WARP, last = i;
        int64_t total = NEVER;
        if (chosen.cost + left * ranking->cost[first] >= best->cost) return;
        if (i + left <= num && chosen.cost + left * ranking->cost[i] < best->cost) {
            uint64_t rest = difference ^ ranking->column[i];
            uint32_t bit = hash(rest);
            if (left == 1) {
                if (rest == 0) total = chosen.cost + ranking->cost[i];
            } else if (ranking->filter[bit >> 5] >> (bit & 31) & 1) {
                for (last = i + 1; last < num && ranking->column[last] != rest;) last++;
                if (last < num) total = chosen.cost + ranking->cost[i] + ranking->cost[last];
            }
        }
        for (uint32_t better = __ballot_sync(FULL_MASK, total < best->cost); better; better &= better - 1) {
            int source = __ffs((int)better) - 1, theirs_last = __shfl_sync(FULL_MASK, last, source);
            int64_t theirs = of_lane(total, source);
            if (theirs >= best->cost) continue;
            uint64_t ranks = chosen.ranks << RANK_BITS | (uint64_t)(first + source);
            best->ranks = left == 1 ? ranks : ranks << RANK_BITS | (uint64_t)theirs_last;
            best->cost = theirs;
            best->num = chosen.num + left;
        }
    }
}

/* Find the flips of a block from the keys that the lanes hold; num is 0 if nothing explains the difference. */
template <int num_keys>
DEVICE struct flips cheapest_flips(const struct code &code, uint64_t difference, const int32_t (&key)[num_keys],
                                   struct ranking *ranking) {
    struct flips best = {0, NEVER, 0};
    uint64_t parity = difference & code.common; /* bits that all columns have: whether the number of flips is odd */
    if (parity != 0 && parity != code.common) return best;
    int num = rank(code, key, ranking);
    for (int size = 1; size <= code.max_flips; size++) {
        if (code.common != 0 && (size & 1) != (parity != 0)) continue;
        struct flips chosen = {0, 0, 0};
        for (int i = 0;;) {
            int left = size - chosen.num;
            if (left <= 2) {
                complete(ranking, num, left, i, chosen, difference, &best);
            } else if (i + left <= num && chosen.cost + left * ranking->cost[i] < best.cost) {
                difference ^= ranking->column[i];
                chosen = {chosen.num + 1, chosen.cost + ranking->cost[i], chosen.ranks << RANK_BITS | (uint64_t)i};
                i++;
                continue;
            }
            if (chosen.num == 0) break;
            i = (int)chosen.ranks & RANK_MASK;
            difference ^= ranking->column[i];
            chosen = {chosen.num - 1, chosen.cost - ranking->cost[i], chosen.ranks >> RANK_BITS};
            i++;
        }
    }
    return best;
}

/* Let the whole warp take the blocks whose `difference` is not 0 in the lane that found it, one after the other. */
template <class Take> DEVICE void for_differing(const struct code_block &mine, uint64_t difference, Take take) {
    for (uint32_t left = __ballot_sync(FULL_MASK, difference != 0); left; left &= left - 1) {
        int source = __ffs((int)left) - 1;
        struct code_block block = mine;
        block.slot = __shfl_sync(FULL_MASK, mine.slot, source);
        block.at = __shfl_sync(FULL_MASK, mine.at, source);
        block.n = __shfl_sync(FULL_MASK, mine.n, source);
        take(block, (uint64_t)of_lane((int64_t)difference, source));
    }
}

#endif
