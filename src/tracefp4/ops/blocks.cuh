/* One block of a scheme in the registers of a thread: read, its largest magnitude, its scale byte and codes. The rules are
 * those of scaling.h, with the scheme as a constant; kernels that quantize include this once.
 *
 * Defines: SCHEME, the numbers of ops/rules.py; DTYPE, `enum dtype`. */

#ifndef TRACEFP4_BLOCKS_CUH
#define TRACEFP4_BLOCKS_CUH

#include "device.cuh"
#include "scaling.h"

constexpr struct scheme RULES = {SCHEME};
constexpr enum dtype INPUT = (enum dtype)DTYPE;
enum { BLOCK = RULES.block };

/* Elements x in bf16 under scales s of few bits (E4M3 times a power of two, or E8M0) need no division: x / s differs from a
 * midpoint between codes by a part of 1 / 256 at least, or not at all, so it may be rounded to bf16 and lies on the same side.
 * Two elements then share every instruction. */
constexpr bool IS_PACKED = INPUT == BFLOAT16 && (RULES.order == POW2 || RULES.order == MX) &&
                           RULES.candidates == SIX && RULES.tie == TO_EVEN && RULES.zero == KEPT;
enum { WORDS = INPUT == FLOAT32 ? BLOCK : BLOCK / 2, WORDS_OF_EIGHT = 8 * WORDS / BLOCK };

/* One block of the scheme as it lies in memory. */
struct values {
    uint32_t word[WORDS];
};

DEVICE struct values load_block(const void *x, int64_t block) {
    struct values values;
    const uint4 *at = static_cast<const uint4 *>(x) + block * (WORDS / 4);
    for (int q = 0; q < WORDS / 4; q++) {
        uint4 four = load_once(at + q);
        values.word[4 * q] = four.x;
        values.word[4 * q + 1] = four.y;
        values.word[4 * q + 2] = four.z;
        values.word[4 * q + 3] = four.w;
    }
    return values;
}

/* The bits of element j of words, widened to float32. */
DEVICE uint32_t bits_at(const uint32_t *word, int j) {
    if (INPUT == FLOAT32) return word[j];
    uint16_t half = (uint16_t)(word[j / 2] >> 16 * (j % 2));
    return load_bits(&half, INPUT, 0);
}

/* The magnitude bits of the largest of the first n elements of words. */
DEVICE int32_t amax_of(const uint32_t *word, int n) {
    if (INPUT == BFLOAT16) {
        uint32_t largest = 0;
        for (int p = 0; p < n / 2; p++) largest = most_u16x2(largest, word[p] & 0x7FFF7FFF);
        return most((int32_t)(largest << 16), (int32_t)(largest & 0x7FFF0000));
    }
    int32_t largest = 0;
    for (int j = 0; j < n; j++) largest = most(largest, (int32_t)(bits_at(word, j) & MAGNITUDE_BITS));
    return largest;
}

DEVICE int32_t amax_of(const struct values &values) { return amax_of(values.word, BLOCK); }

/* The largest among the finite blocks of 16. */
DEVICE int32_t finite_amax(const struct values &values) {
    int32_t largest = 0;
    for (int from = 0; from < BLOCK; from += 16) {
        int32_t amax = amax_of(values.word + from / 8 * WORDS_OF_EIGHT, 16);
        largest = most(largest, amax < INF_BITS ? amax : 0);
    }
    return largest;
}

/* What the elements of a block are rounded under. One that is not finite takes the NaN byte and codes 0. */
struct grid {
    uint32_t byte, keep;
    float decode_scale, factor;
    uint32_t shift, first, rest; /* x * shift * (first + rest) is x / s to 2^-14 of it; all in bf16, twice */
};

DEVICE uint32_t twice(uint32_t half) { return half | half << 16; }

DEVICE struct grid grid_of(int32_t amax_bits, uint32_t byte, struct outer outer) {
    struct grid grid;
    float unit;
    grid.byte = choose(amax_bits < INF_BITS, byte, RULES.order == MX ? 0xFF : NAN_BYTE);
    grid.keep = amax_bits < INF_BITS ? 0xFFFFFFFF : 0;
    decode_bytes(&RULES, 1, &grid.byte, outer, &unit, &grid.decode_scale, &grid.factor);
    if (!IS_PACKED) return grid;
    uint32_t bits = bits_of(grid.factor), exponent = bits >> 23;
    uint32_t shift = exponent < 254 ? (254 - exponent) << 7 : exponent == 254 ? 0x40 : 0; /* 0: an infinite factor */
    grid.shift = twice(shift);
    if (RULES.order == MX) return grid;
    uint32_t inverse = bits_of(reciprocal_fast(float_of((bits & 0x7FFFFF) | 0x3F800000))), cut = inverse & 0xFFFF0000;
    float rest = float_of(inverse) - float_of(cut);
    grid.first = twice(inverse >> 16);
    grid.rest = bf16x2_of(rest, rest);
    return grid;
}

/* The codes nearest to two magnitudes, and more: an element z of the grid is added to 67 times its power of two e (1 for
 * smaller ones), where bf16 numbers are as far apart as codewords, and the last bits count them. */
struct nearest {
    uint32_t sum, power; /* z + 67 e, and e, in bf16 */
};

DEVICE struct nearest nearest_of(uint32_t magnitudes, const struct grid &grid) {
    uint32_t z = mul_bf16x2(magnitudes, grid.shift);
    if (RULES.order != MX) z = fma_bf16x2(z, grid.first, mul_bf16x2(z, grid.rest));
    struct nearest nearest;
    z = least_u16x2(z, 0x40C040C0); /* 6; NaN, which comes of infinity times 0, is larger */
    nearest.power = most_u16x2(z & 0x7F807F80, 0x3F803F80);
    nearest.sum = fma_bf16x2(nearest.power, 0x42864286, z);
    return nearest;
}

/* The magnitude codes in bits 0..2 and 16..18, and others around them: the distance from 128 e, and two for each doubling. */
DEVICE uint32_t codes_in(const struct nearest &nearest) { return nearest.sum + (nearest.sum >> 6); }

/* Eight codes as nibbles, from four pairs in bits 12..15 and 28..31 under which anything may lie. */
DEVICE uint32_t joined(const uint32_t (&pairs)[4]) {
    uint32_t low = __byte_perm(pairs[0], pairs[1], 0x7531), high = __byte_perm(pairs[2], pairs[3], 0x7531);
    return chosen_bits(0x0F0F0F0F, __byte_perm(low, high, 0x6420) >> 4, __byte_perm(low, high, 0x7531));
}

/* Magnitude codes below the signs of a pair, for `joined`: `codes` has them in bits 12..14 and 28..30. */
DEVICE uint32_t signed_pair(uint32_t codes, uint32_t pair) { return chosen_bits(0x70007000, codes, pair); }

/* Eight codes, two elements at a time. */
DEVICE uint32_t packed_codes(const uint32_t *word, const struct grid &grid) {
    uint32_t pairs[4];
    for (int p = 0; p < 4; p++) /* codes_in times 4096; what the low half carries ends below bit 28 */
        pairs[p] = signed_pair(nearest_of(word[p] & 0x7FFF7FFF, grid).sum * (65 << 6), word[p]);
    return joined(pairs);
}

/* Eight codes, under any scheme. */
DEVICE uint32_t codes_of(const uint32_t *word, float factor) {
    uint32_t codes = 0;
    for (int j = 0; j < 8; j++) {
        uint32_t bits = bits_at(word, j), magnitude_bits = bits & MAGNITUDE_BITS, sign = bits >> 31 << 3;
        float magnitude = float_of(magnitude_bits);
        float z = multiplies((enum order)RULES.order) ? magnitude * factor : magnitude / factor;
        if (RULES.zero != KEPT) sign = choose(magnitude_bits == 0, RULES.zero == NEGATIVE ? 8 : 0, sign);
        codes |= ((uint32_t)magnitude_code(z, (enum tie)RULES.tie) | sign) << 4 * j;
    }
    return codes;
}

/* What a block becomes. */
struct encoded {
    uint32_t word[BLOCK / 8]; /* eight codes each, the even index in the low nibble */
    uint32_t byte;
    float decode_scale;
};

/* The scale byte that quantize stores for a block with this largest magnitude. */
DEVICE uint32_t scale_byte_of(int32_t amax_bits, const void *x, int64_t block, struct outer outer) {
    uint32_t byte[BLOCKS];
    struct strip strip;
    strip.x = x;
    strip.dtype = INPUT;
    strip.i = block * BLOCK;
    strip.num_blocks = 1;
    strip.amax_bits[0] = amax_bits;
    if (RULES.candidates == SIX)
        bytes_of_maxima(&RULES, 1, strip.amax_bits, outer, 1.0f, byte);
    else
        find_block_scales(&RULES, &strip, outer, byte);
    return byte[0];
}

/* Eight codes. */
DEVICE uint32_t rounded_to(const struct grid &grid, const uint32_t *word) {
    return grid.keep & (IS_PACKED ? packed_codes(word, grid) : codes_of(word, grid.factor));
}

/* Round a block under a scale byte. */
DEVICE struct encoded encode_under(const struct values &values, int32_t amax_bits, uint32_t byte, struct outer outer) {
    struct grid grid = grid_of(amax_bits, byte, outer);
    struct encoded encoded;
    encoded.byte = grid.byte;
    encoded.decode_scale = grid.decode_scale;
    for (int w = 0; w < BLOCK / 8; w++) encoded.word[w] = rounded_to(grid, values.word + w * WORDS_OF_EIGHT);
    return encoded;
}

/* Choose the scale byte of a block unless it is given, and round. */
DEVICE struct encoded encode(const struct values &values, const void *x, int64_t block, struct outer outer,
                             const uint8_t *given_scales) {
    int32_t amax_bits = amax_of(values);
    uint32_t byte = given_scales ? given_scales[block] : scale_byte_of(amax_bits, x, block, outer);
    return encode_under(values, amax_bits, byte, outer);
}

DEVICE void store_block(const struct encoded &encoded, int64_t block, uint8_t *block_scales, uint8_t *packed) {
    block_scales[block] = (uint8_t)encoded.byte;
    uint2 *to = reinterpret_cast<uint2 *>(packed) + block * (BLOCK / 16);
    for (int w = 0; w < BLOCK / 8; w += 2) to[w / 2] = make_uint2(encoded.word[w], encoded.word[w + 1]);
}

/* The largest of one number per thread, in all of them. */
DEVICE int32_t most_of_block(int32_t mine) {
    SHARED int32_t of_warp[32];
    mine = __reduce_max_sync(FULL_MASK, mine);
    if (blockDim.x == WARP) return mine;
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = mine;
    __syncthreads();
    int lane = (int)threadIdx.x % WARP, num_warps = (int)blockDim.x / WARP;
    return __reduce_max_sync(FULL_MASK, lane < num_warps ? of_warp[lane] : mine);
}

/* The outer scale of values up to amax. */
DEVICE struct outer outer_of_amax(float amax) {
    union {
        int8_t exponent;
        float number;
    } stored;
    write_outer(&RULES, amax, &stored, 0);
    return read_outer(&RULES, &stored, 0);
}

/* The largest magnitude of a row among its finite blocks of 16, in all threads of the block that takes the row. */
DEVICE float row_maximum(const void *x, int64_t row, int width) {
    int64_t first = row * (width / BLOCK);
    int32_t largest = 0;
    for (int b = (int)threadIdx.x; b < width / BLOCK; b += (int)blockDim.x)
        largest = most(largest, finite_amax(load_block(x, first + b)));
    return float_of((uint32_t)most_of_block(largest));
}

#endif
