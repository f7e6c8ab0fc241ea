/* The cheapest set of flips that explains the difference of two syndromes, found by a warp; search.py is the definition.
 *
 * One flip is found among all values at once. For more, the warp ranks the nearest candidates, a candidate a lane. Sets
 * grow one candidate at a time, the same in all lanes, and every lane tries another pair for the last three places: the
 * last column is then known, and looked up by its tag (ops/parity_checks.py). No set is looked for that cannot explain
 * a difference beside another one: together they would be fewer columns than the distance of the code. */

#ifndef TRACEFP4_SEARCH_CUH
#define TRACEFP4_SEARCH_CUH

#include "keys.h"
#include "syndromes.cuh"

enum {
    NOTHING_EXPLAINS = -1, /* a number of flips */
    NEVER = 0x7FFFFFFF, /* above the cost of every set: a distance is 4096 at most */
    RANK_BITS = 6,
    RANK_MASK = (1 << RANK_BITS) - 1,
    INDEX_MASK = (1 << INDEX_BITS) - 1,
    FIRST_GUESS = 256 << INDEX_BITS /* a sixteenth of a decode scale: about 20 of 128 values are nearer */
};

/* The candidates of a block that may be flipped together, nearest first; in shared memory, one for each warp. */
struct ranking {
    int32_t near[WARP]; /* keys in no order, filled up with NO_CANDIDATE */
    uint64_t column[WARP];
    int32_t key[WARP];
    uint8_t place[MAX_LENGTH]; /* one more than the rank of the candidate whose column has this tag; 0 without one */
};

/* The best set so far; the same in all lanes. */
struct flips {
    int num;
    int32_t cost;
    uint64_t ranks; /* RANK_BITS each */
};

DEVICE int rank_at(const struct flips &flips, int f) {
    return (int)(flips.ranks >> RANK_BITS * (flips.num - 1 - f)) & RANK_MASK;
}

DEVICE int32_t cost_of(int32_t key) { return (key >> INDEX_BITS) * (key >> INDEX_BITS); }

/* The columns that explain a difference, one, two or three of them, where a code has a table: positions plus 1 in bytes
 * from the lowest on; 0 for none. A sum of two columns is looked up with the last column added: no other three have that. */
DEVICE uint32_t explained_by(const struct code &code, uint64_t difference) {
    if (difference & 1) return code.triples[difference >> 1];
    uint32_t last = (uint32_t)code.length, found = code.triples[(difference ^ (uint64_t)code.column[last - 1]) >> 1];
    if (found >> 16 == 0) return found ? found | last << 8 : 0;
    return found >> 16 == last ? found & 0xFFFF : 0;
}

/* Look for the few flips that explain a difference where no other set does, by a team of lanes; every lane of the warp
 * calls it. Returns how many there are, 0 for none, and leaves a position in as many of the team's first lanes. Where a
 * code has a table, an odd number of flips is one of these or NOTHING_EXPLAINS. */
DEVICE int flips_alone(const struct code &code, int team, uint64_t difference, int *position) {
    int lane = (int)threadIdx.x % team;
    if (code.triples) {
        uint32_t found = difference ? explained_by(code, difference) : 0;
        *position = (int)(found >> 8 * lane & 0xFF) - 1; /* teams have four lanes at least */
        if (!found) return difference & 1 ? NOTHING_EXPLAINS : 0;
        return 1 + (found >> 8 != 0) + (found >> 16 != 0);
    }
    int found = -1, own = tag_of(code, difference);
    int most_odd = code.max_flips, most_even = code.max_flips;
    if (code.common != 0) {
        most_odd -= (code.max_flips & 1) ^ 1;
        most_even -= code.max_flips & 1;
    }
    int is_one = is_alone(code, 1, most_odd) && (uint64_t)code.by_tag[own] == difference;
    int looks = difference != 0 && !is_one && (difference & code.common) == 0 && is_alone(code, 2, most_even) && team > 1;
    *position = (int)code.positions[own];
    if (!__any_sync(FULL_MASK, looks)) return is_one;
    for (int t = lane; looks && t < code.length; t += team)
        if ((uint64_t)(code.by_tag[t] ^ code.by_tag[t ^ own]) == difference) found = t;
    for (int with = team / 2; with; with /= 2) found = most(found, __shfl_xor_sync(FULL_MASK, found, with));
    if (found < 0) return is_one;
    *position = (int)code.positions[lane ? found ^ own : found];
    return 2;
}

/* How many of the keys that the lanes hold are below a limit. */
template <int num_keys> DEVICE int num_below(const int32_t (&key)[num_keys], int32_t limit) {
    int num = 0;
    for (int i = 0; i < num_keys; i++) num += key[i] < limit;
    return __reduce_add_sync(FULL_MASK, num);
}

/* A limit below which lie all candidates that are ranked, and at most a warp's worth. Keys differ, so there is one. */
template <int num_keys> DEVICE int32_t limit_of(const struct code &code, const int32_t (&key)[num_keys]) {
    int32_t low = 0, high = NO_CANDIDATE, middle = FIRST_GUESS;
    if (num_below(key, high) <= WARP) return high;
    for (;; middle = low + (high - low) / 2) {
        int num = num_below(key, middle);
        if (num > WARP)
            high = middle;
        else if (num < code.num_candidates)
            low = middle;
        else
            return middle;
    }
}

/* Sort the first code.num_candidates of the keys that the lanes hold, which all differ; returns how many there are. */
template <int num_keys> DEVICE int rank(const struct code &code, const int32_t (&key)[num_keys], struct ranking *ranking) {
    int lane = (int)threadIdx.x % WARP, num = 0, smaller = 0;
    int32_t limit = limit_of(code, key);
    __syncwarp(); /* nobody reads the last ranking any more */
    for (int i = lane; i < code.length; i += WARP) ranking->place[i] = 0;
    ranking->near[lane] = NO_CANDIDATE;
    __syncwarp();
    for (int i = 0; i < num_keys; i++) {
        uint32_t below = __ballot_sync(FULL_MASK, key[i] < limit);
        if (key[i] < limit) ranking->near[num + __popc(below & ((1u << lane) - 1))] = key[i];
        num += __popc(below);
    }
    __syncwarp();
    int32_t mine = ranking->near[lane];
    for (int i = 0; i < num; i++) smaller += ranking->near[i] < mine;
    if (lane < num && smaller < code.num_candidates) {
        uint64_t column = (uint64_t)code.column[mine & INDEX_MASK];
        ranking->key[smaller] = mine;
        ranking->column[smaller] = column;
        ranking->place[tag_of(code, column)] = (uint8_t)(smaller + 1);
    }
    __syncwarp();
    return least(num, code.num_candidates);
}

/* Find the nearest candidate that explains a difference alone. */
template <int num_keys>
DEVICE void find_one(const struct code &code, uint64_t difference, const int32_t (&key)[num_keys],
                     struct ranking *ranking, struct flips *best) {
    int32_t mine = NO_CANDIDATE;
    for (int i = 0; i < num_keys; i++)
        if (key[i] != NO_CANDIDATE && (uint64_t)code.column[key[i] & INDEX_MASK] == difference) mine = least(mine, key[i]);
    mine = __reduce_min_sync(FULL_MASK, mine);
    if (mine == NO_CANDIDATE || num_below(key, mine) >= code.num_candidates) return;
    __syncwarp();
    if (threadIdx.x % WARP == 0) ranking->key[0] = mine;
    __syncwarp();
    *best = {1, cost_of(mine), 0};
}

/* The first of the lanes whose sets cost least; -1 if none beats the best set. */
DEVICE int lane_of_cheapest(int32_t total, const struct flips &best) {
    int32_t cheapest = __reduce_min_sync(FULL_MASK, total);
    if (cheapest >= best.cost) return -1;
    return __ffs((int)__ballot_sync(FULL_MASK, total == cheapest)) - 1;
}

/* Complete the chosen candidates by two or three at `from` or later, if that beats the best set. */
DEVICE void complete(const struct code &code, const struct ranking *ranking, int num, int left, int from,
                     const struct flips &chosen, uint64_t difference, struct flips *best) {
    int lane = (int)threadIdx.x % WARP, second = 0, last = 0;
    int32_t own = lane < num ? cost_of(ranking->key[lane]) : 0, total = NEVER;
    uint64_t column = lane < num ? ranking->column[lane] : 0;
    for (int by = left - 2; by + 2 <= num; by++) {
        int next = lane + by, is_open = lane >= from && next + 1 < num;
        uint64_t rest = difference ^ column;
        int32_t cost = chosen.cost + own, bound = cost + own;
        if (left == 3 && is_open) {
            int32_t other = cost_of(ranking->key[next]);
            rest ^= ranking->column[next];
            bound = cost + 2 * other;
            cost += other;
        }
        is_open &= bound < least(best->cost, total);
        if (left == 3 && !__any_sync(FULL_MASK, is_open)) break;
        int place = is_open ? ranking->place[tag_of(code, rest)] - 1 : -1;
        if (place > next && ranking->column[place] == rest) {
            cost += cost_of(ranking->key[place]);
            if (cost < total) total = cost, second = next, last = place;
        }
        if (left == 2 || (is_alone(code, chosen.num + left, chosen.num + left) && __any_sync(FULL_MASK, total != NEVER)))
            break;
    }
    int first = lane_of_cheapest(total, *best);
    if (first < 0) return;
    second = __shfl_sync(FULL_MASK, second, first);
    last = __shfl_sync(FULL_MASK, last, first);
    uint64_t ranks = chosen.ranks << RANK_BITS | (uint64_t)first;
    if (left == 3) ranks = ranks << RANK_BITS | (uint64_t)second;
    *best = {chosen.num + left, __shfl_sync(FULL_MASK, total, first), ranks << RANK_BITS | (uint64_t)last};
}

/* Find the cheapest set of `size` of the ranked candidates, if that beats the best set. */
DEVICE void find_several(const struct code &code, const struct ranking *ranking, int num, int size, uint64_t difference,
                         struct flips *best) {
    struct flips chosen = {0, 0, 0};
    for (int i = 0;;) {
        int left = size - chosen.num;
        if (left <= 3) {
            complete(code, ranking, num, left, i, chosen, difference, best);
            if (best->num == size && is_alone(code, size, size)) return;
        } else if (i + left <= num && chosen.cost + left * cost_of(ranking->key[i]) < best->cost) {
            difference ^= ranking->column[i];
            chosen = {chosen.num + 1, chosen.cost + cost_of(ranking->key[i]), chosen.ranks << RANK_BITS | (uint64_t)i};
            i++;
            continue;
        }
        if (chosen.num == 0) return;
        i = (int)chosen.ranks & RANK_MASK;
        difference ^= ranking->column[i];
        chosen = {chosen.num - 1, chosen.cost - cost_of(ranking->key[i]), chosen.ranks >> RANK_BITS};
        i++;
    }
}

/* Find the cheapest four of the ranked candidates where a code has a table: one candidate leaves three columns. Of sets
 * that cost the same, the one whose nearest candidate is nearest comes first, as in find_several. */
DEVICE void find_four(const struct code &code, const struct ranking *ranking, int num, uint64_t difference,
                      struct flips *best) {
    int lane = (int)threadIdx.x % WARP;
    uint32_t three = lane < num ? code.triples[(difference ^ ranking->column[lane]) >> 1] : 0;
    int32_t total = three >> 16 ? cost_of(ranking->key[lane]) : NEVER;
    uint32_t ranks = (uint32_t)lane;
    for (int i = 0; i < 3 && total != NEVER; i++) {
        uint64_t column = (uint64_t)code.column[(three >> 8 * i & 0xFF) - 1];
        int place = ranking->place[tag_of(code, column)] - 1;
        total = place > lane ? total + cost_of(ranking->key[place]) : NEVER;
        ranks = ranks << RANK_BITS | (uint32_t)place;
    }
    int first = lane_of_cheapest(total, *best);
    if (first < 0) return;
    *best = {4, __shfl_sync(FULL_MASK, total, first), (uint64_t)__shfl_sync(FULL_MASK, ranks, first)};
}

/* Find the flips of a block from the keys that the lanes hold; num is 0 if nothing explains the difference. */
template <int num_keys>
DEVICE struct flips cheapest_flips(const struct code &code, uint64_t difference, const int32_t (&key)[num_keys],
                                   struct ranking *ranking) {
    struct flips best = {0, NEVER, 0};
    uint64_t parity = difference & code.common; /* bits that all columns have: whether the number of flips is odd */
    int num = 0;
    if (parity != 0 && parity != code.common) return best;
    if (code.common == 0 || parity != 0) find_one(code, difference, key, ranking, &best);
    for (int size = 2; size <= code.max_flips; size++) {
        if (code.common != 0 && (size & 1) != (parity != 0)) continue;
        if (best.num && is_alone(code, best.num, size)) continue;
        if (num == 0) {
            num = rank(code, key, ranking);
            if (best.num) best.ranks = (uint64_t)(ranking->place[tag_of(code, difference)] - 1);
        }
        if (code.triples && size == 4)
            find_four(code, ranking, num, difference, &best);
        else
            find_several(code, ranking, num, size, difference, &best);
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
        take(block, of_lane(difference, source));
    }
}

#endif
