/* One draw per row, a thread block each, from the logits and tile weights that head.cu left.
 *
 * Masses are integers: 2^44 for the largest logit of the row, rounded down to nothing below 2^-45 of it. Their sums are
 * exact, so cumulative masses do not depend on who adds what, and no token of mass 0 is ever drawn.
 *
 * bf16 logits are keys of 16 bits, and equal keys have equal mass. A cut (top-k, top-p) is therefore a key and how many of
 * the tokens with it are kept, lowest ids first. It is found by counting keys in a window of WINDOW of them below the
 * largest, and in further windows only if it lies deeper; tiles below a window are not read. Without a cut a row reads the
 * weights of its tiles and one tile.
 *
 * Defines: THREADS, of a block. */

#include "bf16_keys.cuh"
#include "tiles.cuh"

enum { WARPS = THREADS / WARP, WINDOW = 8192, PER_THREAD = WINDOW / THREADS, NONE = -2, NAN_KEY = 1 << 16 };
static_assert(WINDOW % THREADS == 0, "threads share a window evenly");
#define WHOLE 0x1p44f

/* A row, and what the block has found out about it. */
struct row {
    const uint16_t *logits;
    const struct weights *tiles;
    int num_tiles;
    float largest, sharpness;
    uint64_t *mass; /* of every tile, what is kept of it */
    int *ties;      /* tokens of the cut's key in earlier tiles */
};

/* Tokens with a greater key are kept, and the first `ties` of those that have it. */
struct cut {
    int key, ties;
};

DEVICE uint64_t mass_of(float logit, float largest, float sharpness) {
    return (uint64_t)(exp2_fast((logit - largest) * sharpness) * WHOLE + 0.5f);
}

DEVICE uint64_t from_lane_above(uint64_t x, int by) {
    uint32_t low = __shfl_up_sync(FULL_MASK, (uint32_t)x, by);
    return low | (uint64_t)__shfl_up_sync(FULL_MASK, (uint32_t)(x >> 32), by) << 32;
}

/* The sum over this lane and those before it. */
DEVICE uint64_t sum_of_lanes(uint64_t mine) {
    int lane = (int)threadIdx.x % WARP;
    for (int by = 1; by < WARP; by *= 2) {
        uint64_t other = from_lane_above(mine, by);
        mine += lane >= by ? other : 0;
    }
    return mine;
}

/* The sum over the threads before this one, and over all. */
DEVICE uint64_t sum_before(uint64_t mine, uint64_t *total) {
    SHARED uint64_t of_warp[WARPS];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    uint64_t before = sum_of_lanes(mine);
    __syncthreads(); /* the last sums have been read */
    if (lane == WARP - 1) of_warp[warp] = before;
    __syncthreads();
    before -= mine;
    *total = 0;
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? of_warp[w] : 0;
        *total += of_warp[w];
    }
    return before;
}

/* The largest of one number per thread. Two calls need a barrier between them. */
DEVICE int most_of_block(int mine) {
    SHARED int of_warp[WARPS];
    for (int with = WARP / 2; with; with /= 2) mine = most(mine, __shfl_xor_sync(FULL_MASK, mine, with));
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = mine;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) mine = most(mine, of_warp[w]);
    return mine;
}

/* Four neighbouring logits of a tile, those of this lane. */
struct four {
    int key[4];
};

DEVICE struct four read_four(const struct row &row, int tile) {
    uint2 words = reinterpret_cast<const uint2 *>(row.logits + (int64_t)tile * TILE)[threadIdx.x % WARP];
    struct four four;
    four.key[0] = key_of(words.x & 0xFFFF);
    four.key[1] = key_of(words.x >> 16);
    four.key[2] = key_of(words.y & 0xFFFF);
    four.key[3] = key_of(words.y >> 16);
    return four;
}

DEVICE int key_of_tile(const struct row &row, int tile) { return key_of(bits_of(row.tiles[tile].largest) >> 16); }

/* The key at which the measure of the tokens from the largest down reaches `limit`, at least 1: their number, or their mass.
 * {-1, 0} if it never does. Two calls need a barrier between them. */
DEVICE struct cut find_cut(const struct row &row, double limit, int by_mass) {
    SHARED int count[WINDOW + WINDOW / PER_THREAD]; /* a gap after each thread's part, against bank conflicts */
    SHARED struct cut found;
    int thread = (int)threadIdx.x;
    uint64_t before = 0;
    for (int high = key_of(bits_of(row.largest) >> 16); high >= 0;) {
        int low = most(high - WINDOW + 1, 0), next = -1;
        for (int i = thread; i < WINDOW + WINDOW / PER_THREAD; i += THREADS) count[i] = 0;
        if (thread == 0) found.key = NONE;
        __syncthreads();
        for (int tile = thread / WARP; tile < row.num_tiles; tile += WARPS) {
            int top = key_of_tile(row, tile);
            if (top < low) {
                next = most(next, top);
                continue;
            }
            struct four four = read_four(row, tile);
            for (int i = 0; i < 4; i++) {
                int depth = high - four.key[i];
                if (depth >= WINDOW)
                    next = most(next, four.key[i]);
                else if (depth >= 0)
                    atomicAdd(&count[depth + depth / PER_THREAD], 1); /* integers: any order gives the same */
            }
        }
        next = most_of_block(next);
        const int *mine = count + thread * (PER_THREAD + 1);
        int key = high - thread * PER_THREAD;
        uint64_t sum = 0, total;
        for (int i = 0; i < PER_THREAD; i++)
            if (mine[i]) sum += mine[i] * (by_mass ? mass_of(number_of(key - i), row.largest, row.sharpness) : 1);
        uint64_t reached = before + sum_before(sum, &total);
        if ((double)reached < limit && (double)(reached + sum) >= limit)
            for (int i = 0; i < PER_THREAD; i++) {
                if (!mine[i]) continue;
                uint64_t each = by_mass ? mass_of(number_of(key - i), row.largest, row.sharpness) : 1;
                if ((double)(reached + mine[i] * each) >= limit) {
                    double ties = ceil((limit - (double)reached) / (double)each);
                    found.key = key - i;
                    found.ties = ties < (double)mine[i] ? most((int)ties, 1) : mine[i];
                    break;
                }
                reached += mine[i] * each;
            }
        __syncthreads();
        if (found.key != NONE) return found;
        before += total;
        high = next;
    }
    return {-1, 0};
}

/* Write what a cut keeps of every tile; return the mass before this thread's part of the tiles, and in all. */
DEVICE uint64_t weigh_kept(const struct row &row, struct cut cut, uint64_t *total) {
    int thread = (int)threadIdx.x;
    for (int tile = thread / WARP; tile < row.num_tiles; tile += WARPS) {
        uint64_t above = 0, ties = 0;
        if (key_of_tile(row, tile) >= cut.key) {
            struct four four = read_four(row, tile);
            for (int i = 0; i < 4; i++) {
                ties += four.key[i] == cut.key;
                above += four.key[i] > cut.key ? mass_of(number_of(four.key[i]), row.largest, row.sharpness) : 0;
            }
            above = sum_of_lanes(above);
            ties = sum_of_lanes(ties);
        }
        if (thread % WARP == WARP - 1) {
            row.mass[tile] = above;
            row.ties[tile] = (int)ties;
        }
    }
    __syncthreads();
    int part = (row.num_tiles + THREADS - 1) / THREADS, first = least(thread * part, row.num_tiles);
    int last = least(first + part, row.num_tiles);
    uint64_t mine = 0;
    for (int tile = first; tile < last; tile++) mine += row.ties[tile];
    int ties_before = (int)sum_before(mine, total);
    uint64_t each = cut.ties ? mass_of(number_of(cut.key), row.largest, row.sharpness) : 0;
    mine = 0;
    for (int tile = first; tile < last; tile++) {
        int ties = row.ties[tile];
        row.ties[tile] = ties_before;
        row.mass[tile] += most(least(cut.ties - ties_before, ties), 0) * each;
        ties_before += ties;
        mine += row.mass[tile];
    }
    return sum_before(mine, total);
}

/* The same where everything is kept, from the weights of the tiles. */
DEVICE uint64_t weigh_all(const struct row &row, uint64_t *total) {
    int part = (row.num_tiles + THREADS - 1) / THREADS, first = least((int)threadIdx.x * part, row.num_tiles);
    int last = least(first + part, row.num_tiles);
    uint64_t mine = 0;
    for (int tile = first; tile < last; tile++) {
        struct weights of = row.tiles[tile];
        row.mass[tile] = (uint64_t)(exp2_fast((of.largest - row.largest) * row.sharpness) * of.sum * WHOLE + 0.5f);
        row.ties[tile] = 0;
        mine += row.mass[tile];
    }
    return sum_before(mine, total);
}

/* The tile in which a cumulative mass lies, and how far into it; `before` is what lies before this thread's part. */
DEVICE int tile_at(const struct row &row, uint64_t target, uint64_t before, uint64_t *into) {
    SHARED uint64_t shared_into;
    SHARED int shared_tile;
    int part = (row.num_tiles + THREADS - 1) / THREADS, first = least((int)threadIdx.x * part, row.num_tiles);
    int last = least(first + part, row.num_tiles);
    for (int tile = first; tile < last; tile++) {
        if (target >= before && target - before < row.mass[tile]) {
            shared_tile = tile;
            shared_into = target - before;
        }
        before += row.mass[tile];
    }
    __syncthreads();
    *into = shared_into;
    return shared_tile;
}

/* Which of this lane's four a cut keeps: bits. `ties` tokens of its key come before the tile. */
DEVICE int kept_of(const struct four &four, struct cut cut, int ties) {
    int mine = 0, kept = 0;
    for (int i = 0; i < 4; i++) mine += four.key[i] == cut.key;
    int rank = ties + (int)sum_of_lanes((uint64_t)mine) - mine;
    for (int i = 0; i < 4; i++)
        if (four.key[i] > cut.key || (four.key[i] == cut.key && rank++ < cut.ties)) kept |= 1 << i;
    return kept;
}

/* The token of a tile at `into` of its mass; for a warp. Masses within a tile count from its own largest logit, since those
 * of the row may be too coarse there. */
DEVICE int token_at(const struct row &row, struct cut cut, int tile, uint64_t into) {
    int lane = (int)threadIdx.x % WARP;
    struct four four = read_four(row, tile);
    int kept = kept_of(four, cut, row.ties[tile]);
    uint64_t mass[4], mine = 0;
    for (int i = 0; i < 4; i++) {
        mass[i] = kept >> i & 1 ? mass_of(number_of(four.key[i]), row.tiles[tile].largest, row.sharpness) : 0;
        mine += mass[i];
    }
    uint64_t until = sum_of_lanes(mine), total = until;
    for (int with = WARP / 2; with; with /= 2) {
        uint32_t low = __shfl_xor_sync(FULL_MASK, (uint32_t)total, with);
        uint64_t other = low | (uint64_t)__shfl_xor_sync(FULL_MASK, (uint32_t)(total >> 32), with) << 32;
        total = other > total ? other : total;
    }
    uint64_t target = (uint64_t)((double)into / (double)row.mass[tile] * (double)total);
    if (target >= total) target = total - 1;
    uint64_t reached = until - mine;
    int found = -1;
    for (int i = 0; i < 4; i++) {
        if (found < 0 && target >= reached && target - reached < mass[i]) found = tile * TILE + 4 * lane + i;
        reached += mass[i];
    }
    int winner = __ffs((int)__ballot_sync(FULL_MASK, found >= 0)) - 1;
    return __shfl_sync(FULL_MASK, found, winner);
}

/* The first token of the largest logit, all of whose tiles before `tile` have less; for a warp. */
DEVICE int largest_of(const struct row &row, int tile) {
    struct four four = read_four(row, tile);
    int found = -1, key = key_of(bits_of(row.largest) >> 16);
    for (int i = 3; i >= 0; i--)
        if (four.key[i] == key) found = tile * TILE + 4 * (int)(threadIdx.x % WARP) + i;
    return __shfl_sync(FULL_MASK, found, __ffs((int)__ballot_sync(FULL_MASK, found >= 0)) - 1);
}

/* 2^64 times a number in [0, 1), its 53 leading bits random: noise.py. */
DEVICE uint64_t noise_of(int64_t key, int64_t position) {
    uint64_t state = (uint64_t)key + (uint64_t)position * 0x9E3779B97F4A7C15u;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    state ^= state >> 31;
    return state >> 11 << 11;
}

/* Parameters of draws as columns; `forced` may be null. */
KERNEL __launch_bounds__(THREADS) draw_tokens(const uint16_t *logits, const struct weights *weights, int num_tiles,
                                              int vocabulary, const int64_t *keys, const int64_t *positions,
                                              const double *temperatures, const int64_t *top_ks, const double *top_ps,
                                              const int64_t *forced, uint64_t *mass, int *ties, int64_t *tokens,
                                              double *logprobs) {
    await_earlier();
    int64_t at = blockIdx.x, first = at * num_tiles;
    struct row row = {logits + first * TILE, weights + first, num_tiles, 0.0f, 0.0f, mass + first, ties + first};
    int thread = (int)threadIdx.x, largest = 0, token = forced ? (int)forced[at] : -1;
    for (int tile = thread; tile < num_tiles; tile += THREADS)
        largest = most(largest, row.tiles[tile].sum == row.tiles[tile].sum ? key_of_tile(row, tile) : NAN_KEY);
    largest = most_of_block(largest);
    if (largest == NAN_KEY || number_of(largest) == MINUS_INFINITY || token >= vocabulary) {
        if (thread == 0) {
            tokens[at] = token;
            logprobs[at] = (double)float_of(NAN_BITS);
        }
        return;
    }
    double temperature = temperatures[at], top_p = top_ps[at];
    int is_greedy = temperature == 0.0;
    row.largest = number_of(largest);
    row.sharpness = sharpness_of(temperature);
    struct cut cut = {-1, 0};
    uint64_t total, before = weigh_all(row, &total);
    if (top_ks[at] > 0 && top_ks[at] < vocabulary) {
        cut = find_cut(row, (double)top_ks[at], 0);
        before = weigh_kept(row, cut, &total);
    }
    if (!is_greedy && top_p < 1.0) {
        double limit = top_p * (double)total;
        struct cut nearer = find_cut(row, limit > 1.0 ? limit : 1.0, 1);
        if (nearer.key > cut.key || (nearer.key == cut.key && nearer.ties < cut.ties)) cut = nearer;
        before = weigh_kept(row, cut, &total);
    }
    uint64_t into = 0;
    int tile = token >= 0 ? token / TILE : 0;
    if (token < 0 && is_greedy) {
        int earliest = num_tiles;
        for (int t = num_tiles - 1 - thread; t >= 0; t -= THREADS)
            earliest = key_of_tile(row, t) == largest ? t : earliest;
        tile = -most_of_block(-earliest);
    } else if (token < 0) {
        tile = tile_at(row, __umul64hi(noise_of(keys[at], positions[at]), total), before, &into);
    }
    if (thread >= WARP) return; /* the first warp does the rest */
    if (token < 0) token = is_greedy ? largest_of(row, tile) : token_at(row, cut, tile, into);
    __syncwarp();
    int lane = token % TILE / 4, kept = kept_of(read_four(row, tile), cut, row.ties[tile]);
    if (thread != lane) return;
    double logit = (double)float_of_bf16(row.logits[token]) - (double)row.largest;
    double found = logit / (is_greedy ? 1.0 : temperature) - log((double)total * 0x1p-44);
    tokens[at] = token;
    logprobs[at] = kept >> token % 4 & 1 ? found : -(double)float_of(INF_BITS);
}
