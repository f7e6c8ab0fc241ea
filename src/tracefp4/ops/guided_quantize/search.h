/* The cheapest set of flips that explains the difference of two syndromes; search.py is the definition.
 *
 * Candidates are sorted by distance, so the sets of one size are tried in the order that decides ties, and a set whose
 * cheapest continuation already costs as much as the best one ends its branch. */

#ifndef TRACEFP4_SEARCH_H
#define TRACEFP4_SEARCH_H

#include "../syndromes.h"
#include "keys.h"

enum {
    FIRST_LIMIT = 256 << INDEX_BITS, /* a sixteenth of a decode scale: about 20 of 128 values are nearer */
    LAST_LIMIT = 1 << 25
};

/* The candidates of a block, nearest first. */
struct ranking {
    int num, most;
    int32_t key[MAX_CANDIDATES];
};

/* What a search works on, and the best set that it has found. */
struct search {
    int num, size;
    uint64_t column[MAX_CANDIDATES];
    int64_t cost[MAX_CANDIDATES], best;
    int chosen[MAX_FLIPS], found[MAX_FLIPS], num_found;
    uint64_t filter[4]; /* the bit of every column's hash: most differences that no last flip explains have none */
};

/* Sort the first `ranking->most` of n keys. Most keys are above a guess at the last of these, which is raised where it
 * was too low, and need not be sorted. */
static void rank(struct ranking *ranking, int n, const int32_t *restrict key) {
    int32_t below[MAX_LENGTH], limit = FIRST_LIMIT;
    int num_below = 0;
    for (;; limit *= 2) {
        int count = 0;
        for (int j = 0; j < n; j++) count += key[j] < limit;
        if (count >= ranking->most || limit > LAST_LIMIT) break;
    }
    limit = limit > LAST_LIMIT ? NO_CANDIDATE : limit;
    for (int j = 0; j < n; j++) {
        below[num_below] = key[j];
        num_below += key[j] < limit;
    }
    ranking->num = 0;
    for (int i = 0; i < num_below; i++) {
        if (ranking->num == ranking->most) {
            if (below[i] >= ranking->key[ranking->num - 1]) continue;
            ranking->num--;
        }
        int at = ranking->num++;
        for (; at > 0 && ranking->key[at - 1] > below[i]; at--) ranking->key[at] = ranking->key[at - 1];
        ranking->key[at] = below[i];
    }
}

/* Take the cheapest last flip at `from` or later that completes the chosen ones, if that beats the best set. */
INLINE void complete(struct search *search, int from, uint64_t difference, int64_t cost) {
    uint32_t bit = hash(difference);
    if (!(search->filter[bit >> 6] >> (bit & 63) & 1)) return;
    for (int i = from; i < search->num; i++) {
        if (cost + search->cost[i] >= search->best) return;
        if (search->column[i] != difference) continue;
        search->best = cost + search->cost[i];
        search->num_found = search->size;
        search->chosen[search->size - 1] = i;
        memcpy(search->found, search->chosen, sizeof search->found);
        return;
    }
}

/* Try every set of search->size candidates that begins with the `depth` chosen ones and goes on at `from` or later. */
static void extend(struct search *search, int from, int depth, uint64_t difference, int64_t cost) {
    int left = search->size - depth;
    if (left == 1) {
        complete(search, from, difference, cost);
        return;
    }
    for (int i = from; i + left <= search->num; i++) {
        if (cost + left * search->cost[i] >= search->best) return;
        search->chosen[depth] = i;
        if (left == 2)
            complete(search, i + 1, difference ^ search->column[i], cost + search->cost[i]);
        else
            extend(search, i + 1, depth + 1, difference ^ search->column[i], cost + search->cost[i]);
    }
}

/* Find the flips of a block from the keys of its n bits; their indices go to `flips`. Returns how many, 0 for none. */
static int cheapest_flips(const struct code *code, uint64_t difference, int n, const int32_t *key, int *flips) {
    /* Bits that all columns have say whether the number of flips is odd. */
    uint64_t common = (uint64_t)code->common, parity = difference & common;
    if (parity != 0 && parity != common) return 0;
    struct ranking ranking;
    ranking.most = (int)code->num_candidates;
    rank(&ranking, n, key);
    struct search search;
    search.num = ranking.num;
    search.best = INT64_MAX;
    search.num_found = 0;
    memset(search.filter, 0, sizeof search.filter);
    for (int i = 0; i < ranking.num; i++) {
        int64_t distance = ranking.key[i] >> INDEX_BITS;
        search.cost[i] = distance * distance;
        search.column[i] = (uint64_t)code->column[ranking.key[i] & ((1 << INDEX_BITS) - 1)];
        search.filter[hash(search.column[i]) >> 6] |= (uint64_t)1 << (hash(search.column[i]) & 63);
    }
    for (search.size = 1; search.size <= (int)code->max_flips; search.size++)
        if (common == 0 || (search.size & 1) == (parity != 0)) extend(&search, 0, 0, difference, 0);
    for (int i = 0; i < search.num_found; i++)
        flips[i] = ranking.key[search.found[i]] & ((1 << INDEX_BITS) - 1);
    return search.num_found;
}

#endif
