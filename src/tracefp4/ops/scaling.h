/* Schemes in C: from block maxima to scale bytes, to what elements are divided by, and to codes. The definitions are
 * formats/scaling.py, e8m0.py, selection.py and encoding.py, which these functions equal bit for bit.
 *
 * A kernel takes a row in strips and, for each, calls read_strip, find_block_scales (or brings its own bytes) and
 * encode_strip; everything in between stays in the first-level cache. Functions of a strip switch once on the rules
 * of the scheme, outside of their loops. */

#ifndef TRACEFP4_SCALING_H
#define TRACEFP4_SCALING_H

#include "e2m1.h"

/* The members of formats/order.py, numbered in their order there. */
enum order { POW2, MODELOPT, TORCHAO, COMPRESSED_TENSORS, VLLM, TRANSFORMER_ENGINE, FOUROVERSIX, MX };
enum scale_rule { E4M3, FLOOR, EVEN, RCEIL, CEIL };
enum candidates { SIX, MSE, MAE, ABSMAX };
enum sum { TREE, SEQUENTIAL, FOLDED };

/* A scheme as ops/rules.py writes it. */
struct scheme {
    int32_t block;      /* elements per block: 16 or 32 */
    int32_t order, scale_rule, candidates, sum, tie, zero;
    int32_t limit;      /* 6 * scale_max */
    int32_t zero_byte, underflow_byte, least_byte;
};

/* An outer scale, and what the formulas of formats/order.py derive from it. */
struct outer {
    float stored;  /* 2^k, g, G or A; 1 where there is none */
    float divisor; /* G where A is stored (1 for A = 0), otherwise what is stored */
    float inverse; /* 1 / divisor */
};

enum { BLOCKS = STRIP / 16 /* the most in a strip */ };
#define LEAST_MULTIPLIER 0x1p-116f

/* Up to STRIP elements of a row, whole blocks. */
struct strip {
    const void *x;
    enum dtype dtype;
    int64_t i;                 /* the first element */
    int num_blocks;
    int32_t amax_bits[BLOCKS]; /* INF_BITS or more where a block is not finite */
};

/* Elements of LANES blocks of 16: entry [j][lane] is element j of block `lane`. Sums over j are then sums of vectors,
 * in any order that a scheme asks for. */
typedef float lanes[16][LANES];

static inline struct outer read_outer(const struct scheme *scheme, const void *outer, int64_t index) {
    enum order order = (enum order)scheme->order;
    float stored = 1.0f;
    if (order == POW2)
        stored = power_of_two(((const int8_t *)outer)[index]);
    else if (order != MX)
        stored = ((const float *)outer)[index];
    float divisor = stored;
    if (order == TRANSFORMER_ENGINE || order == FOUROVERSIX)
        divisor = stored == 0.0f ? 1.0f : (float)scheme->limit / stored;
    struct outer found = {stored, divisor, 1.0f / divisor};
    if (order == POW2) found.inverse = power_of_two(-((const int8_t *)outer)[index]);
    return found;
}

/* The largest magnitude of a row among its finite blocks of 16. */
static inline float row_amax_of(enum dtype dtype, const void *x, int64_t start, int64_t width) {
    switch (dtype) {
        case FLOAT32: return float_of((uint32_t)row_amax_bits(x, FLOAT32, start, width));
        case BFLOAT16: return float_of((uint32_t)row_amax_bits(x, BFLOAT16, start, width));
        default: return float_of((uint32_t)row_amax_bits(x, FLOAT16, start, width));
    }
}

#ifndef TRACEFP4_ON_DEVICE
/* The largest magnitude of each row; a function of every library that includes this. */
EXPORT void row_amax(int64_t first, int64_t last, const void *x, int dtype, int64_t width, float *amax) {
    for (int64_t row = first; row < last; row++) amax[row] = row_amax_of((enum dtype)dtype, x, row * width, width);
}
#endif

/* Write the outer scale of values up to amax. */
static inline void write_outer(const struct scheme *scheme, float amax, void *outer, int64_t index) {
    float limit = (float)scheme->limit, found = amax / limit, zero = 1.0f;
    if (scheme->order == POW2) {
        ((int8_t *)outer)[index] = (int8_t)pow2_exponent((int32_t)bits_of(amax), limit);
        return;
    }
    if (scheme->order == TRANSFORMER_ENGINE || scheme->order == FOUROVERSIX) {
        found = amax > limit * LEAST_MULTIPLIER ? amax : limit * LEAST_MULTIPLIER;
        zero = 0.0f;
    } else if (scheme->order == COMPRESSED_TENSORS || scheme->order == VLLM) {
        found = 1.0f / amax * limit;
        found = found < 1.0f / LEAST_MULTIPLIER ? found : 1.0f / LEAST_MULTIPLIER;
    } else {
        found = found > LEAST_MULTIPLIER ? found : LEAST_MULTIPLIER;
    }
    ((float *)outer)[index] = amax == 0.0f ? zero : found;
}

/* x / 6 for x >= 0, rounded once. On a GPU the general division is a call for some operands; a quotient that is corrected by
 * its exact remainder is the rounded one, since a sixth is rounded correctly, except where the quotient is subnormal: far
 * below the smallest scale. */
INLINE float sixth_of(float x) {
#ifdef TRACEFP4_ON_DEVICE
    const float sixth = (float)(1.0 / 6.0);
    float quotient = x * sixth, corrected = fmaf(fmaf(-6.0f, quotient, x), sixth, quotient);
    return bits_of(x) < INF_BITS ? corrected : x;
#else
    return x / 6.0f;
#endif
}

/* The number that is rounded to E4M3. */
INLINE float raw_block_scale(enum order order, float amax, struct outer outer) {
    const float sixth = (float)(1.0 / 6.0);
    switch (order) {
        case POW2: return sixth_of(amax * outer.inverse);
        case MODELOPT: return amax / (outer.stored * 6.0f);
        case TORCHAO: return amax / 6.0f / outer.stored;
        case VLLM: return outer.divisor * (amax * sixth);
        case TRANSFORMER_ENGINE: return amax * (outer.divisor * sixth);
        default: return amax / 6.0f * outer.divisor;
    }
}

/* What multiplies a decoded code. */
INLINE float decode_scale_of(enum order order, float unit, struct outer outer, float limit) {
    switch (order) {
        case COMPRESSED_TENSORS:
        case VLLM: return unit / outer.stored;
        case TRANSFORMER_ENGINE:
        case FOUROVERSIX: return unit * outer.stored / limit;
        default: return unit * outer.stored;
    }
}

INLINE int multiplies(enum order order) { return order == TORCHAO || (order >= VLLM && order != MX); }

/* What an element is divided or multiplied by before it is rounded; 0 / 0 and the like become zeros. */
INLINE float element_factor(enum order order, float unit, struct outer outer, float decode_scale) {
    if (!multiplies(order)) return divisor_of(decode_scale);
    float factor = order == TORCHAO ? outer.inverse / unit : 1.0f / (unit * outer.inverse);
    return float_of(choose(unit > 0.0f, bits_of(factor), 0));
}

INLINE void e4m3_bytes(enum order order, const struct scheme *scheme, int n, const int32_t *restrict amax_bits,
                       struct outer outer, float stretch, uint32_t *restrict byte) {
    uint32_t underflow = (uint32_t)scheme->underflow_byte, zero = (uint32_t)scheme->zero_byte;
    for (int g = 0; g < n; g++) {
        float raw = raw_block_scale(order, float_of((uint32_t)amax_bits[g]), outer) * stretch;
        uint32_t found = encode_e4m3(float_of((uint32_t)least((int32_t)bits_of(raw), MAX_SCALE_BITS)));
        found = choose(found == 0, underflow, found);
        found = (uint32_t)most((int32_t)found, scheme->least_byte);
        found = choose(amax_bits[g] == 0, zero, found);
        byte[g] = choose(amax_bits[g] < INF_BITS, found, NAN_BYTE);
    }
}

/* The biased exponent of a scale before its fraction is dropped, in units of 2^-23; Inf and NaN count as 2^128. What
 * is added to the bits of amax carries into the exponent where a rule takes the next power of two. */
INLINE int32_t unrounded_e8m0(const struct scheme *scheme, int32_t amax_bits) {
    const int32_t carries[] = {0, 0, 0x200000, 0x3FFFFF, 0x7FFFFF};
    return most(least(amax_bits, INF_BITS) + carries[scheme->scale_rule] - (2 << 23), 0);
}

static inline void e8m0_bytes(const struct scheme *scheme, int n, const int32_t *restrict amax_bits, uint32_t *byte) {
    for (int g = 0; g < n; g++) {
        int32_t found = least(unrounded_e8m0(scheme, amax_bits[g]) >> 23, 254);
        byte[g] = choose(amax_bits[g] < INF_BITS, (uint32_t)found, 0xFF);
    }
}

/* Call f(order, ...) with the order as a constant. */
#define FOR_ORDER(order, f, ...)                                                 \
    switch (order) {                                                             \
        case POW2: f(POW2, __VA_ARGS__); break;                                  \
        case MODELOPT: f(MODELOPT, __VA_ARGS__); break;                          \
        case TORCHAO: f(TORCHAO, __VA_ARGS__); break;                            \
        case COMPRESSED_TENSORS: f(COMPRESSED_TENSORS, __VA_ARGS__); break;      \
        case VLLM: f(VLLM, __VA_ARGS__); break;                                  \
        case TRANSFORMER_ENGINE: f(TRANSFORMER_ENGINE, __VA_ARGS__); break;      \
        default: f(FOUROVERSIX, __VA_ARGS__); break;                             \
    }

/* The scale bytes of n blocks from their maxima; stretch is 1, or 1.5 for the scale under which the maximum becomes 4. */
static void bytes_of_maxima(const struct scheme *scheme, int n, const int32_t *restrict amax_bits, struct outer outer,
                            float stretch, uint32_t *restrict byte) {
    if (scheme->order == MX)
        e8m0_bytes(scheme, n, amax_bits, byte);
    else
        FOR_ORDER(scheme->order, e4m3_bytes, scheme, n, amax_bits, outer, stretch, byte)
}

INLINE void e4m3_factors(enum order order, float limit, int n, const uint32_t *restrict byte, struct outer outer, float *restrict unit,
                         float *restrict decode_scale, float *restrict factor) {
    for (int g = 0; g < n; g++) {
        unit[g] = decode_e4m3(byte[g]);
        decode_scale[g] = decode_scale_of(order, unit[g], outer, limit);
        factor[g] = element_factor(order, unit[g], outer, decode_scale[g]);
    }
}

/* What n scale bytes stand for: s, the decode scale, and what elements are divided or multiplied by. */
static void decode_bytes(const struct scheme *scheme, int n, const uint32_t *restrict byte, struct outer outer, float *restrict unit,
                         float *restrict decode_scale, float *restrict factor) {
    float limit = (float)scheme->limit;
    if (scheme->order != MX) {
        FOR_ORDER(scheme->order, e4m3_factors, limit, n, byte, outer, unit, decode_scale, factor)
        return;
    }
    for (int g = 0; g < n; g++) {
        unit[g] = decode_scale[g] = decode_e8m0(byte[g]);
        factor[g] = divisor_of(unit[g]);
    }
}

INLINE void amax_of_strip(enum dtype dtype, int block, struct strip *strip) {
    const void *x = strip->x; /* copies, because what is stored might alias the members */
    int64_t i = strip->i;
    for (int g = 0, n = strip->num_blocks; g < n; g++)
        strip->amax_bits[g] = block_amax_bits(x, dtype, i + g * block, block);
}

/* Read the strip that begins at element i, with `left` elements left in its row. */
static inline void read_strip(const struct scheme *scheme, const void *x, enum dtype dtype, int64_t i, int64_t left,
                              struct strip *strip) {
    strip->x = x;
    strip->dtype = dtype;
    strip->i = i;
    strip->num_blocks = strip_length(left) / scheme->block;
    if (scheme->block == 16) {
        FOR_DTYPE(dtype, amax_of_strip, 16, strip)
    } else {
        FOR_DTYPE(dtype, amax_of_strip, 32, strip)
    }
}

/* The magnitudes of up to LANES blocks of 16 from block g of a strip on; 0 in blocks that are not finite, and beyond. */
INLINE void read_lanes(enum dtype dtype, const struct strip *strip, int g, lanes magnitude) {
    for (int lane = 0; lane < LANES; lane++) {
        int is_finite = g + lane < strip->num_blocks && strip->amax_bits[g + lane] < INF_BITS;
        for (int j = 0; j < 16; j++) {
            uint32_t bits = is_finite ? load_bits(strip->x, dtype, strip->i + 16 * (g + lane) + j) : 0;
            magnitude[j][lane] = float_of(bits & MAGNITUDE_BITS);
        }
    }
}

INLINE void rounded_lanes(int multiplies, enum tie tie, lanes magnitude, const float *factor, const float *scale,
                          lanes value) {
    for (int j = 0; j < 16; j++)
        for (int lane = 0; lane < LANES; lane++) {
            float by = factor[lane], z = multiplies ? magnitude[j][lane] * by : magnitude[j][lane] / by;
            value[j][lane] = rounded_magnitude(z, tie) * scale[lane];
        }
}

/* The magnitudes rounded to codes under a factor, times a scale. */
static void round_lanes(const struct scheme *scheme, lanes magnitude, const float *factor, const float *scale,
                        lanes value) {
    if (scheme->tie == TOWARD_ZERO)
        rounded_lanes(multiplies((enum order)scheme->order), TOWARD_ZERO, magnitude, factor, scale, value);
    else if (multiplies((enum order)scheme->order))
        rounded_lanes(1, TO_EVEN, magnitude, factor, scale, value);
    else
        rounded_lanes(0, TO_EVEN, magnitude, factor, scale, value);
}

/* The sum of the 16 terms of each block, in the scheme's order; see ErrorSum in formats/order.py. */
static void sum_lanes(enum sum sum, lanes term, float *total) {
    int width = 16, until = sum == TREE ? 1 : sum == FOLDED ? 8 : 16;
    for (; width > until; width /= 2)
        for (int j = 0; j < width / 2; j++)
            for (int lane = 0; lane < LANES; lane++) term[j][lane] += term[j + width / 2][lane];
    for (int j = 1; j < width; j++)
        for (int lane = 0; lane < LANES; lane++) term[0][lane] += term[j][lane];
    memcpy(total, term[0], sizeof term[0]);
}

/* How wrong each block is under a scale byte: squared, absolute or largest error; see formats/selection.py. */
static void errors_of_lanes(const struct scheme *scheme, lanes magnitude, const uint32_t *byte, struct outer outer,
                            float *errors) {
    float unit[LANES], decode_scale[LANES], factor[LANES], limit = (float)scheme->limit;
    lanes value;
    decode_bytes(scheme, LANES, byte, outer, unit, decode_scale, factor);
    if (scheme->order == TRANSFORMER_ENGINE || scheme->order == FOUROVERSIX) {
        round_lanes(scheme, magnitude, factor, unit, value);
        for (int j = 0; j < 16; j++)
            for (int lane = 0; lane < LANES; lane++) value[j][lane] = value[j][lane] * outer.stored / limit;
    } else {
        round_lanes(scheme, magnitude, factor, decode_scale, value);
    }
    for (int j = 0; j < 16; j++)
        for (int lane = 0; lane < LANES; lane++) {
            float difference = value[j][lane] - magnitude[j][lane];
            value[j][lane] = scheme->candidates == MSE ? difference * difference
                                                       : float_of(bits_of(difference) & MAGNITUDE_BITS);
        }
    if (scheme->candidates != ABSMAX) {
        sum_lanes((enum sum)scheme->sum, value, errors);
        return;
    }
    for (int lane = 0; lane < LANES; lane++) errors[lane] = 0.0f;
    for (int j = 0; j < 16; j++)
        for (int lane = 0; lane < LANES; lane++)
            errors[lane] = value[j][lane] > errors[lane] ? value[j][lane] : errors[lane];
}

/* The scale bytes stored for a strip, the NaN byte where a block is not finite. */
static inline void read_block_scales(const struct scheme *scheme, const struct strip *strip,
                                     const uint8_t *block_scales, uint32_t *byte) {
    uint32_t nan_byte = scheme->order == MX ? 0xFF : NAN_BYTE;
    block_scales += strip->i / scheme->block;
    for (int g = 0; g < strip->num_blocks; g++)
        byte[g] = choose(strip->amax_bits[g] < INF_BITS, block_scales[g], nan_byte);
}

static inline void write_block_scales(const struct scheme *scheme, const struct strip *strip, const uint32_t *byte,
                                      uint8_t *block_scales) {
    block_scales += strip->i / scheme->block;
    for (int g = 0, n = strip->num_blocks; g < n; g++) block_scales[g] = (uint8_t)byte[g];
}

/* The scale bytes that quantize stores; entries beyond the blocks of the strip are 0. */
static void find_block_scales(const struct scheme *scheme, const struct strip *strip, struct outer outer,
                              uint32_t byte[BLOCKS]) {
    memset(byte, 0, BLOCKS * sizeof *byte);
    bytes_of_maxima(scheme, strip->num_blocks, strip->amax_bits, outer, 1.0f, byte);
    if (scheme->candidates == SIX) return;
    uint32_t four[BLOCKS] = {0};
    bytes_of_maxima(scheme, strip->num_blocks, strip->amax_bits, outer, 1.5f, four);
    for (int g = 0; g < strip->num_blocks; g += LANES) {
        lanes magnitude;
        float error_of_six[LANES], error_of_four[LANES];
        FOR_DTYPE(strip->dtype, read_lanes, strip, g, magnitude)
        errors_of_lanes(scheme, magnitude, byte + g, outer, error_of_six);
        errors_of_lanes(scheme, magnitude, four + g, outer, error_of_four);
        for (int lane = 0; lane < LANES; lane++)
            byte[g + lane] = choose(error_of_four[lane] < error_of_six[lane], four[g + lane], byte[g + lane]);
    }
}

/* Round the elements of a strip to codes and pack them. Codes of blocks that are not finite are 0. */
INLINE void round_strip(enum dtype dtype, int block, int multiplies, enum tie tie, enum zero zero,
                        const struct strip *strip, const float *factor, uint8_t *packed) {
    uint32_t wide[STRIP];
    uint8_t code[STRIP];
    const void *x = strip->x;
    int64_t i = strip->i;
    int n = strip->num_blocks * block;
    for (int start = 0; start < n; start += LANES) {
        float by = factor[start / block];
        uint32_t keep = strip->amax_bits[start / block] < INF_BITS ? 15 : 0;
        for (int j = 0; j < LANES; j++) {
            uint32_t bits = load_bits(x, dtype, i + start + j), magnitude_bits = bits & MAGNITUDE_BITS;
            float magnitude = float_of(magnitude_bits);
            int32_t m = magnitude_code(multiplies ? magnitude * by : magnitude / by, tie);
            uint32_t sign = bits >> 31 << 3;
            if (zero != KEPT) sign = choose(magnitude_bits == 0, zero == NEGATIVE ? 8 : 0, sign);
            wide[start + j] = ((uint32_t)m | sign) & keep;
        }
    }
    for (int j = 0; j < n; j++) code[j] = (uint8_t)wide[j];
    pack(code, n / 2, packed + strip->i / 2);
}

/* Write the scale bytes of a strip, and the codes nearest to its elements under them. */
static void encode_strip(const struct scheme *scheme, const struct strip *strip, struct outer outer,
                         const uint32_t *byte, uint8_t *block_scales, uint8_t *packed) {
    float unit[BLOCKS], decode_scale[BLOCKS], factor[BLOCKS];
    decode_bytes(scheme, strip->num_blocks, byte, outer, unit, decode_scale, factor);
    write_block_scales(scheme, strip, byte, block_scales);
    enum zero zero = (enum zero)scheme->zero;
    int multiplied = multiplies((enum order)scheme->order);
    if (scheme->tie == TOWARD_ZERO) {
        FOR_DTYPE(strip->dtype, round_strip, scheme->block, multiplied, TOWARD_ZERO, zero, strip, factor, packed)
    } else if (multiplied) {
        FOR_DTYPE(strip->dtype, round_strip, 16, 1, TO_EVEN, zero, strip, factor, packed)
    } else if (scheme->block == 16) {
        FOR_DTYPE(strip->dtype, round_strip, 16, 0, TO_EVEN, zero, strip, factor, packed)
    } else {
        FOR_DTYPE(strip->dtype, round_strip, 32, 0, TO_EVEN, zero, strip, factor, packed)
    }
}

#endif
