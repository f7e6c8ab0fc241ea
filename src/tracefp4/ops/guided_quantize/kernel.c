/* guided_quantize in C: the sweep of quantize, but each value goes to a codeword next to it, towards the recorded
 * decision, and is decoded at once. The definition is reference.py; its head derives the rules for whole codes and
 * single bits, which are followed here strip by strip. Everything else is `segments.h`'s, segment by segment.
 *
 * Works on the rows [first, last) of whole, contiguous tensors. The width of a row is a multiple of the block size. */

#include "recovery.h"
#include "segments.h"

/* Round a strip, and return how many codes guidance changed; blocks whose scale is 0 or NaN are not guided. */
INLINE int64_t follow_strip(enum dtype dtype, enum rule rule, int multiplies, enum tie tie, enum zero zero, int block,
                            const struct strip *strip, const struct scales *scales, const uint8_t *decisions,
                            struct result result) {
    uint32_t decision[STRIP], code[STRIP];
    float value[STRIP];
    const void *x = strip->x;
    int64_t i = strip->i;
    int n = strip->num_blocks * block;
    int32_t num_changed = 0;
    if (rule != NEAREST)
        for (int j = 0; j < n; j++) decision[j] = decisions[i + j];
    for (int start = 0; start < n; start += LANES) {
        float by = scales->factor[start / block], scale = scales->decode_scale[start / block];
        uint32_t keep = strip->amax_bits[start / block] < INF_BITS ? 0xFFFFFFFF : 0;
        int32_t is_guided = scale > 0.0f;
        for (int j = start; j < start + LANES; j++) {
            uint32_t bits = load_bits(x, dtype, i + j) & keep, magnitude_bits = bits & MAGNITUDE_BITS;
            uint32_t sign = bits >> 31;
            if (zero != KEPT) sign = choose(magnitude_bits == 0, zero == NEGATIVE, sign) & keep;
            float magnitude = float_of(magnitude_bits);
            float z = multiplies ? magnitude * by : magnitude / by;
            z = z < 6.0f ? z : 6.0f;
            int32_t nearest = magnitude_code(z, tie), m = nearest;
            if (rule != NEAREST) m += is_guided * (follow(rule, z, m, decision[j], sign) - m);
            num_changed += m != nearest;
            value[j] = float_of((bits_of(code_magnitude(m) * scale) & MAGNITUDE_BITS) | sign << 31);
            code[j] = (uint32_t)m | sign << 3;
        }
    }
    if (dtype == FLOAT32)
        memcpy((float *)result.values + i, value, (size_t)n * sizeof *value);
    else
        for (int j = 0; j < n; j++) ((uint16_t *)result.values)[i + j] = bf16_bits(value[j]);
    if (result.codes != NULL)
        for (int j = 0; j < n; j++) result.codes[i + j] = (uint8_t)code[j];
    return num_changed;
}

/* Call f(dtype, rule, ...) with both as constants. */
#define FOR_RULE(dtype, rule, f, ...)                                \
    switch (rule) {                                                  \
        case NEAREST: return f(dtype, NEAREST, __VA_ARGS__);         \
        case FULL: return f(dtype, FULL, __VA_ARGS__);               \
        case BRACKET: return f(dtype, BRACKET, __VA_ARGS__);         \
        default: return f(dtype, NEAREST_CELL, __VA_ARGS__);         \
    }

/* Our rules (quotients, blocks of 16, ties to even, zeros as they are) are constants of loops of their own, and so are
 * products with ties to even; other rules are read inside of the loops. */
INLINE int64_t follow_under(enum dtype dtype, enum rule rule, const struct scheme *scheme, const struct strip *strip,
                            const struct scales *scales, const uint8_t *decisions, struct result result) {
    enum tie tie = (enum tie)scheme->tie;
    enum zero zero = (enum zero)scheme->zero;
    int multiplied = multiplies((enum order)scheme->order), block = scheme->block;
    if (tie == TO_EVEN && zero == KEPT && block == 16 && !multiplied)
        FOR_RULE(dtype, rule, follow_strip, 0, TO_EVEN, KEPT, 16, strip, scales, decisions, result)
    if (tie == TO_EVEN && multiplied)
        FOR_RULE(dtype, rule, follow_strip, 1, TO_EVEN, zero, 16, strip, scales, decisions, result)
    FOR_RULE(dtype, rule, follow_strip, multiplied, tie, zero, block, strip, scales, decisions, result)
}

/* Not inlined into the loop over rows: in one function with it, bf16 rows took 4 % longer. */
static __attribute__((noinline)) int64_t follow_guide(enum dtype dtype, enum rule rule, const struct scheme *scheme,
                                                    const struct strip *strip, const struct scales *scales,
                                                    const uint8_t *decisions, struct result result) {
    if (dtype == FLOAT32) return follow_under(FLOAT32, rule, scheme, strip, scales, decisions, result);
    return follow_under(BFLOAT16, rule, scheme, strip, scales, decisions, result);
}

/* Round one row strip by strip; returns how many codes guidance changed. */
static int64_t round_strips(const struct scheme *scheme, const void *x, enum dtype dtype, int64_t start, int64_t end,
                            struct outer outer, int is_valid, enum rule rule, const uint8_t *decisions,
                            uint8_t *block_scales, struct result result, int64_t *in_band) {
    int64_t num_changed = 0;
    for (int64_t i = start; i < end; i += STRIP) {
        struct strip strip;
        struct scales scales;
        uint32_t byte[BLOCKS];
        read_strip(scheme, x, dtype, i, end - i, &strip);
        if (is_valid)
            read_block_scales(scheme, &strip, block_scales, byte);
        else
            find_block_scales(scheme, &strip, outer, byte);
        decode_bytes(scheme, strip.num_blocks, byte, outer, scales.unit, scales.decode_scale, scales.factor);
        write_block_scales(scheme, &strip, byte, block_scales);
        for (int g = 0; is_valid && g < strip.num_blocks; g++)
            *in_band += scales.decode_scale[g] > 0.0f ? scheme->block : 0;
        num_changed += follow_guide(dtype, rule, scheme, &strip, &scales, decisions, result);
    }
    return num_changed;
}

/* Round rows. valid: NULL without a guide; the rows that follow `decisions` under the bytes which `block_scales`
 * holds for them, or which are decoded from `recorded_scales`, and, in a row scheme, under the outer scale in `outer`.
 * Those of all other rows are found and written; without is_row_scheme, one outer scale is given for all. counts: two
 * for every row, values in the band and undecoded blocks; NULL without a guide. Returns how many codes guidance
 * changed. */
EXPORT int64_t guided_rows(int64_t first, int64_t last, const struct scheme *scheme, const void *x, int dtype,
                           int64_t width, int rule, float band, const uint8_t *valid, const uint8_t *decisions,
                           const struct code *code, int scale_coding, const uint8_t *recorded_scales,
                           const struct code *scale_code, int is_row_scheme, void *outer, uint8_t *block_scales,
                           void *values, uint8_t *codes, int32_t *counts) {
    struct result result = {values, codes};
    int64_t num_changed = 0, num_blocks = width / scheme->block;
    int64_t scale_width = scale_code == NULL ? num_blocks : syndrome_bytes(scale_code, num_blocks);
    int is_by_segment = rule >= LOW2_BRACKET || band < INFINITY;
    for (int64_t row = first; row < last; row++) {
        int64_t start = row * width, end = start + width, in_band = 0, undecoded = 0;
        int is_valid = valid != NULL && valid[row];
        if (is_row_scheme && !is_valid)
            write_outer(scheme, row_amax_of((enum dtype)dtype, x, start, width), outer, row);
        struct outer outer_here = read_outer(scheme, outer, is_row_scheme ? row : 0);
        if (is_valid && scale_coding != RAW_SCALES)
            undecoded += recover_scales(scheme, x, (enum dtype)dtype, start, width, outer_here, scale_coding,
                                        scale_code, recorded_scales + row * scale_width,
                                        block_scales + row * num_blocks);
        if (is_valid && is_by_segment)
            num_changed += round_segments(scheme, x, (enum dtype)dtype, row, width, outer_here, (enum rule)rule, band,
                                          code, decisions, block_scales, result, &in_band, &undecoded);
        else
            num_changed += round_strips(scheme, x, (enum dtype)dtype, start, end, outer_here, is_valid,
                                        is_valid ? (enum rule)rule : NEAREST, decisions, block_scales, result,
                                        &in_band);
        if (counts != NULL) {
            counts[2 * row] = (int32_t)in_band;
            counts[2 * row + 1] = (int32_t)undecoded;
        }
    }
    return num_changed;
}
