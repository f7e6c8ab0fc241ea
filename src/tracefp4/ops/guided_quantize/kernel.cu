/* guided_quantize on a GPU: a thread takes blocks of a row, finds or decodes their scales, rounds and follows. Syndromes
 * are compared once a row is rounded (flips.cuh).
 *
 * Defines: those of flips.cuh. */

#include "flips.cuh"

/* With syndromes the search would take so many registers that few rows are under way: at most 64 a thread. */
#if RULE == 6
#define RESIDENT __launch_bounds__(512, 2)
#else
#define RESIDENT
#endif

static_assert(BY_SYNDROMES == (RULE == 6), "RESIDENT is for syndromes");
constexpr bool BY_PAIRS = IS_PACKED && !HAS_BAND && (FOLLOWS == FULL || FOLLOWS == NEAREST_CELL);

/* The outer scale of this row: recorded, found, or the one of all rows. */
DEVICE struct outer outer_of_row(const struct place &place, const struct values &values, const void *x, int num_blocks,
                                 const struct guide &guide, int is_valid, void *outer) {
    if (!PER_ROW) return read_outer(&RULES, outer, 0);
    union stored stored;
    int finds = place.is_there && !is_valid;
    if (place.threads > WARP ? finds : __any_sync(FULL_MASK, finds)) stored = own_outer(place, values, x, num_blocks);
    if (is_valid) {
        stored = load_outer(guide.outer, place.row);
        if (!is_possible(stored)) stop_here();
    }
    if (place.is_there && place.thread == 0) store_outer(stored, outer, place.row);
    return read_outer(&RULES, &stored, 0);
}

/* The scale byte of a block that a guide means. */
DEVICE uint32_t guided_byte(const struct guide &guide, int64_t block, int32_t amax_bits, struct outer outer,
                            const struct result &result) {
    if (SCALES_BY_SYNDROMES) return result.block_scales[block];
    uint8_t recorded = guide.block_scales[block];
    if (SCALES == RAW_SCALES) {
        if (RULES.order != MX && recorded > NAN_BYTE && amax_bits < INF_BITS) stop_here();
        return recorded;
    }
    struct strip strip;
    strip.num_blocks = 1;
    strip.amax_bits[0] = amax_bits;
    uint8_t found;
    cosets_of_strip(&RULES, &strip, outer, SCALES, &recorded, &found);
    return found;
}

/* Eight codes that follow eight decisions, of values whose scale is usable. */
DEVICE uint32_t followed_codes(const struct values &values, int from, float factor, float band, uint2 decisions,
                               struct tally &tally) {
    uint32_t word = 0;
    for (int j = 0; j < 8; j++) {
        struct on_grid at = place_on_grid(bits_at(values.word, from + j), factor);
        int32_t asked = at.m;
        if (!BY_SYNDROMES)
            asked = follow(FOLLOWS, at.z, at.m, (j < 4 ? decisions.x : decisions.y) >> 8 * (j % 4) & 0xFF, at.sign);
        if (HAS_BAND) {
            if (cell_distance(at.z, at.m, asked) > band) asked = at.m;
            tally.in_band += cell_distance(at.z, at.m, at.m + alternative_step(at.z, at.m)) <= band;
        }
        tally.changed += asked != at.m;
        word |= ((uint32_t)asked | at.sign << 3) << 4 * j;
    }
    return word;
}

/* What two bf16 numbers at a time are compared with under a scale s, which is one, too. Numbers are cut to bf16 where they
 * are none: x lies above one exactly where it lies above that. */
struct edges {
    uint32_t scale, least;    /* s, and the largest x that float32 has no quotient for but 0 */
    uint32_t even[3], odd[3]; /* between the cells of even codes, and of odd ones */
};

DEVICE struct edges edges_of(float scale) {
    const float even[3] = {0.5f, 1.5f, 3.0f}, odd[3] = {1.0f, 2.125f, 4.25f};
    struct edges edges;
    edges.scale = twice(bits_of(scale) >> 16);
    edges.least = twice(bits_of(scale * 0x1p-75f * 0x1p-75f) >> 16);
    for (int i = 0; i < 3; i++) {
        edges.even[i] = twice(bits_of(scale * even[i]) >> 16);
        edges.odd[i] = twice(bits_of(scale * odd[i]) >> 16);
    }
    return edges;
}

/* FULL for two elements, as 128 plus a code in bf16: `own` are the nearest codes so, `two` the recorded ones. */
DEVICE uint32_t in_bracket(uint32_t pair, const struct nearest &nearest, uint32_t own, uint32_t two,
                           const struct edges &edges) {
    uint32_t magnitudes = pair & 0x7FFF7FFF, other_sign = (two ^ pair >> 12) & 0x00080008;
    uint32_t goal = (two & ~(other_sign - (other_sign >> 3)) & 0x00070007) | 0x43004300;
    uint32_t edge = mul_bf16x2(fma_bf16x2(nearest.power, 0xC286C286, nearest.sum), edges.scale);
    uint32_t is_above = above_bf16x2(magnitudes, most_u16x2(edge, edges.least));
    uint32_t lowest = fma_bf16x2(above_bf16x2(edge, magnitudes), 0xBF80BF80, own);
    return least_u16x2(most_u16x2(goal, lowest), add_bf16x2(own, is_above));
}

/* NEAREST_CELL for two elements, likewise. */
DEVICE uint32_t in_cell(uint32_t pair, uint32_t two, const struct edges &edges) {
    uint32_t parity = two & 0x00010001, is_odd = parity * 0xFFFF, asked = parity | 0x43004300;
    for (int i = 0; i < 3; i++) {
        uint32_t edge = (edges.odd[i] & is_odd) | (edges.even[i] & ~is_odd);
        asked = fma_bf16x2(above_bf16x2(pair & 0x7FFF7FFF, edge), 0x40004000, asked);
    }
    return asked;
}

/* followed_codes, two elements at a time. */
DEVICE uint32_t followed_pairs(const uint32_t *word, const struct grid &grid, const struct edges &edges, uint2 decisions,
                               struct tally &tally) {
    uint32_t codes[4], changed = 0;
    for (int p = 0; p < 4; p++) {
        uint32_t two = __byte_perm(p < 2 ? decisions.x : decisions.y, 0, p % 2 ? 0x4342 : 0x4140);
        struct nearest nearest = nearest_of(word[p] & 0x7FFF7FFF, grid);
        uint32_t own = (codes_in(nearest) & 0x00070007) | 0x43004300;
        uint32_t asked = FOLLOWS == FULL ? in_bracket(word[p], nearest, own, two, edges) : in_cell(word[p], two, edges);
        changed += (asked ^ own) & 0x00010001; /* what is asked for is at most a code away */
        codes[p] = signed_pair(asked << 12, word[p]);
    }
    tally.changed += (int)((changed & 0xFFFF) + (changed >> 16));
    return joined(codes);
}

/* What was recorded of the elements of a block. */
struct decisions {
    uint2 eight[BLOCK / 8];
};

DEVICE struct decisions load_decisions(const struct guide &guide, int64_t block) {
    struct decisions decisions;
    for (int w = 0; w < BLOCK / 8; w++) {
        decisions.eight[w] = make_uint2(0, 0);
        if (!BY_SYNDROMES && guide.decisions)
            decisions.eight[w] = __ldcs(reinterpret_cast<const uint2 *>(guide.decisions) + block * (BLOCK / 8) + w);
    }
    return decisions;
}

/* How many values of a block lie near their alternative, two elements at a time; nearness.py has the bounds. */
DEVICE int num_near(const struct values &values, const struct encoded &encoded, const struct grid &grid,
                    const uint4 *bounds) {
    int row = RULES.order == MX ? 0 : bits_of(encoded.decode_scale) >> 20 & 7;
    uint4 below = bounds[2 * row], above = bounds[2 * row + 1];
    uint32_t near = 0;
    for (int p = 0; p < BLOCK / 2; p += 2) {
        uint32_t four = encoded.word[p / 4] >> 8 * (p % 4) & 0x7777;
        uint32_t below_low = __byte_perm(below.x, below.y, four), below_high = __byte_perm(below.z, below.w, four);
        uint32_t above_low = __byte_perm(above.x, above.y, four), above_high = __byte_perm(above.z, above.w, four);
        for (int h = 0; h < 2; h++) {
            uint32_t y = mul_bf16x2(values.word[p + h] & 0x7FFF7FFF, grid.shift), pick = h ? 0x7362 : 0x5140;
            y = least_u16x2(y, 0x41C041C0);
            uint32_t is_near = above_bf16x2(__byte_perm(below_low, below_high, pick), y) |
                               above_bf16x2(y, __byte_perm(above_low, above_high, pick));
            near += is_near & 0x00800080;
        }
    }
    return (int)((near & 0xFFFF) + (near >> 16)) >> 7;
}

/* Round a block of a valid row; nearest codes for syndromes, which are compared later. */
DEVICE struct encoded follow_block(const struct values &values, const struct decisions &decisions, int32_t amax_bits,
                                   uint32_t byte, struct outer outer, float band, const uint4 *bounds,
                                   struct tally &tally, int *near) {
    struct encoded encoded;
    struct grid grid = grid_of(amax_bits, byte, outer);
    int before = tally.in_band, is_usable = amax_bits < INF_BITS && grid.decode_scale > 0.0f;
    if (BY_SYNDROMES && (!HAS_BAND || IS_PACKED)) {
        encoded = encode_under(values, amax_bits, byte, outer);
        if (IS_PACKED) *near = is_usable ? num_near(values, encoded, grid, bounds) : 0;
        tally.in_band += HAS_BAND ? *near : is_usable ? BLOCK : 0;
        return encoded;
    }
    if (!is_usable) return encode_under(values, amax_bits, byte, outer);
    struct edges edges;
    if (BY_PAIRS) edges = edges_of(grid.decode_scale);
    encoded.byte = byte;
    encoded.decode_scale = grid.decode_scale;
    if (!HAS_BAND) tally.in_band += BLOCK;
    for (int w = 0; w < BLOCK / 8; w++)
        encoded.word[w] = BY_PAIRS ? followed_pairs(values.word + w * WORDS_OF_EIGHT, grid, edges, decisions.eight[w], tally)
                                   : followed_codes(values, 8 * w, grid.factor, band, decisions.eight[w], tally);
    *near = tally.in_band - before;
    return encoded;
}

/* Write the sums over the thread block. */
DEVICE void count(const struct tally &tally, int32_t *counts) {
    SHARED int32_t of_warp[32][3];
    int32_t mine[3] = {tally.changed, tally.in_band, tally.undecoded};
    for (int i = 0; i < 3; i++) {
        mine[i] = __reduce_add_sync(FULL_MASK, mine[i]);
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP][i] = mine[i];
    }
    __syncthreads();
    if (threadIdx.x >= 3) return;
    int32_t sum = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) sum += of_warp[w][threadIdx.x];
    counts[blockIdx.x * 3 + threadIdx.x] = sum;
}

/* Round rows; `threads` of a thread block take each. bounds: between values that are near and others, for syndromes where
 * elements are taken two at a time. counts: three for every thread block, values that guidance changed,
 * values in the band and undecoded blocks; NULL without a guide. */
KERNEL RESIDENT guided_rows(const void *x, int num_rows, int width, int threads, float band, const uint4 *bounds, const uint8_t *valid,
                   const uint8_t *decisions, const int64_t *code, const void *recorded_outer,
                   const uint8_t *recorded_scales, const int64_t *scale_code, void *outer, uint8_t *block_scales,
                   void *values, uint8_t *codes, int32_t *counts) {
    await_earlier();
    DYNAMIC_SHARED(unsigned char, shared);
    struct place place = place_of(num_rows, threads);
    struct guide guide = {valid, decisions, code, recorded_outer, recorded_scales, scale_code};
    struct result result = {outer, block_scales, values, codes};
    struct scratch scratch = scratch_of(shared, width, (int)blockDim.x / threads);
    struct tally tally = {0, 0, 0};
    struct values of_block; /* the first block of this thread stays in registers, and is under way first */
    struct decisions asked;
    int num_blocks = width / BLOCK;
    if (place.is_there && place.thread < num_blocks) {
        of_block = load_block(x, place.row * num_blocks + place.thread);
        asked = load_decisions(guide, place.row * num_blocks + place.thread);
    }
    int is_valid = valid && place.is_there && valid[place.row];
    struct outer scale = outer_of_row(place, of_block, x, num_blocks, guide, is_valid, outer);
    if (SCALES_BY_SYNDROMES) recover_scales(place, guide, x, num_blocks, is_valid, scale, scratch, result, tally);
    for (int b = place.thread; place.is_there && b < num_blocks; b += threads) {
        int64_t block = place.row * num_blocks + b;
        if (b != place.thread) {
            of_block = load_block(x, block);
            asked = load_decisions(guide, block);
        }
        int32_t amax_bits = amax_of(of_block);
        int near = UNCOUNTED;
        struct encoded encoded;
        if (is_valid) {
            uint32_t byte = guided_byte(guide, block, amax_bits, scale, result);
            encoded = follow_block(of_block, asked, amax_bits, byte, scale, band, bounds, tally, &near);
        } else {
            encoded = encode_under(of_block, amax_bits, scale_byte_of(amax_bits, x, block, scale), scale);
        }
        store_rounded(encoded, block, values, block_scales, codes);
        if (!BY_SYNDROMES) continue;
        put_lowest(encoded, scratch.bits + place.slot * words_of_bits(width), b);
        scratch.of_block[place.slot * num_blocks + b] = amax_bits < INF_BITS ? near : UNKNOWN;
    }
    if (BY_SYNDROMES)
        flip_values(place, guide, x, width, HAS_BAND ? band : PLAUSIBLE_DISTANCE, scratch, result, tally);
    if (counts) count(tally, counts);
}

/* The largest magnitude of each row, among its finite blocks of 16; a thread block a row. */
KERNEL row_maxima(const void *x, int width, float *amax) {
    await_earlier();
    float largest = row_maximum(x, blockIdx.x, width);
    if (threadIdx.x == 0) amax[blockIdx.x] = largest;
}
