/* search_scales in C: the sweep of quantize, with a search between finding the bytes and rounding. The definition is
 * reference.py. Sixteen blocks compete at a time, one in each lane.
 *
 * Works on the rows [first, last) of whole, contiguous tensors, whose width is a multiple of 16. */

#include "../scaling.h"

/* The bytes to try, as distances from the default, in order; and the least one. */
struct window {
    const int32_t *offsets;
    int count;
    int32_t lowest;
};

enum { LARGEST_BYTE = 0x7E };

/* The importances of LANES blocks over the largest of each; ones where none are given, zeros beyond the row. */
static void read_weights(const float *importance, int num_blocks, lanes weight) {
    for (int lane = 0; lane < LANES; lane++) {
        float largest = 0.0f;
        for (int j = 0; j < 16; j++) {
            float h = importance == NULL ? 1.0f : lane < num_blocks ? importance[16 * lane + j] : 0.0f;
            weight[j][lane] = h;
            largest = h > largest ? h : largest;
        }
        for (int j = 0; j < 16; j++) weight[j][lane] /= largest == 0.0f ? 1.0f : largest;
    }
}

/* Weighted squared errors under a byte, of blocks brought to (.5, 1] by the power of two `unit`. */
static void weighted_errors(const struct scheme *scheme, struct outer outer, lanes magnitude, lanes weight,
                            const float *unit, const uint32_t *byte, float *errors) {
    float scale[LANES], decode_scale[LANES], factor[LANES];
    lanes value;
    decode_bytes(scheme, LANES, byte, outer, scale, decode_scale, factor);
    round_lanes(scheme, magnitude, factor, decode_scale, value);
    for (int j = 0; j < 16; j++)
        for (int lane = 0; lane < LANES; lane++) {
            float difference = (value[j][lane] - magnitude[j][lane]) * unit[lane];
            value[j][lane] = difference * difference * weight[j][lane];
        }
    sum_lanes((enum sum)scheme->sum, value, errors);
}

/* Replace the bytes of LANES blocks by the best of their windows. A byte of 0 stands for zeros and is kept; so is the
 * NaN byte, because nothing is less than its error, NaN. */
static void search_lanes(const struct scheme *scheme, struct outer outer, const struct window *window,
                         lanes magnitude, lanes weight, const int32_t *amax_bits, uint32_t *byte) {
    float unit[LANES], least_error[LANES], error[LANES];
    uint32_t candidate[LANES], best[LANES];
    for (int lane = 0; lane < LANES; lane++)
        unit[lane] = power_of_two(-pow2_exponent(least(amax_bits[lane], INF_BITS), 1.0f));
    memcpy(best, byte, sizeof best);
    weighted_errors(scheme, outer, magnitude, weight, unit, byte, least_error);
    for (int c = 0; c < window->count; c++) {
        for (int lane = 0; lane < LANES; lane++) {
            int32_t tried = least(most((int32_t)byte[lane] + window->offsets[c], window->lowest), LARGEST_BYTE);
            candidate[lane] = choose(byte[lane] != 0, (uint32_t)tried, 0);
        }
        weighted_errors(scheme, outer, magnitude, weight, unit, candidate, error);
        for (int lane = 0; lane < LANES; lane++) {
            int is_better = error[lane] < least_error[lane];
            best[lane] = choose(is_better, candidate[lane], best[lane]);
            least_error[lane] = float_of(choose(is_better, bits_of(error[lane]), bits_of(least_error[lane])));
        }
    }
    memcpy(byte, best, sizeof best);
}

/* Quantize rows under searched scales. outer: given, one for each rows_per_outer rows. importance: NULL, or row
 * importance_row[row] of a matrix as wide as x for each row. */
EXPORT void search_rows(int64_t first, int64_t last, const struct scheme *scheme, const void *x, int dtype,
                        int64_t width, int64_t rows_per_outer, const void *outer, const float *importance,
                        const int64_t *importance_row, const int32_t *offsets, int num_offsets,
                        uint8_t *block_scales, uint8_t *packed) {
    const struct window window = {offsets, num_offsets, most(1, scheme->least_byte)};
    for (int64_t row = first; row < last; row++) {
        int64_t start = row * width, end = start + width;
        struct outer scale = read_outer(scheme, outer, row / rows_per_outer);
        const float *weights = importance == NULL ? NULL : importance + importance_row[row] * width;
        for (int64_t i = start; i < end; i += STRIP) {
            struct strip strip;
            uint32_t byte[BLOCKS];
            read_strip(scheme, x, (enum dtype)dtype, i, end - i, &strip);
            find_block_scales(scheme, &strip, scale, byte);
            for (int g = 0; g < strip.num_blocks; g += LANES) {
                lanes magnitude, weight;
                FOR_DTYPE(dtype, read_lanes, &strip, g, magnitude)
                read_weights(weights == NULL ? NULL : weights + (i - start) + 16 * g, strip.num_blocks - g, weight);
                search_lanes(scheme, scale, &window, magnitude, weight, strip.amax_bits + g, byte + g);
            }
            encode_strip(scheme, &strip, scale, byte, block_scales, packed);
        }
    }
}
