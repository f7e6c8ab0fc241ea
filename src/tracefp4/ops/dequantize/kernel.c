/* dequantize in C. The definition is reference.py. Works on the rows [first, last) of whole, contiguous tensors. */

#include "../e2m1.h"

/* Where the decode scale of a block comes from: an E4M3 byte times 2^k; an E8M0 byte; or float32, found elsewhere. */
enum scales { E4M3_POW2 = 0, E8M0 = 1, FOUND = 2 };

/* The parts of a BlockTensor. */
struct stored {
    const uint8_t *packed;
    const void *block_scales; /* bytes, or the decode scales themselves */
    const int8_t *outer;      /* k, for E4M3_POW2 */
    int64_t width;            /* elements of a row, a multiple of the block size */
    int64_t rows_per_outer;   /* rows that share an entry of `outer` */
};

INLINE float decode_scale(enum scales scales, const struct stored *t, int64_t block, float up) {
    if (scales == FOUND) return ((const float *)t->block_scales)[block];
    uint32_t byte = ((const uint8_t *)t->block_scales)[block];
    return scales == E8M0 ? decode_e8m0(byte) : decode_e4m3(byte) * up;
}

/* bf16 is asked for only where it is exact, so its bits are the upper half; NaN becomes torch's. */
INLINE void dequantize_strip(enum dtype dtype, int block, const uint8_t *packed, const float *scale, int n,
                             void *values, int64_t i) {
    uint8_t code[STRIP];
    unpack(packed, n / 2, code);
    for (int start = 0; start < n; start += LANES) {
        float by = scale[start / block];
        if (dtype == BFLOAT16 && by != by) by = float_of((uint32_t)BF16_NAN_BITS << 16);
        for (int j = 0; j < LANES; j++) {
            uint32_t c = code[start + j];
            float value = float_of(bits_of(code_magnitude((int32_t)(c & 7))) | (c & 8) << 28) * by;
            if (dtype == FLOAT32)
                ((float *)values)[i + start + j] = value;
            else
                ((uint16_t *)values)[i + start + j] = (uint16_t)(bits_of(value) >> 16);
        }
    }
}

INLINE void dequantize_rows(enum dtype dtype, enum scales scales, int block, int64_t first, int64_t last,
                            const struct stored *t, void *values) {
    for (int64_t row = first; row < last; row++) {
        int64_t end = (row + 1) * t->width;
        float up = scales == E4M3_POW2 ? power_of_two(t->outer[row / t->rows_per_outer]) : 1.0f;
        for (int64_t i = row * t->width; i < end; i += STRIP) {
            int n = strip_length(end - i);
            float scale[STRIP / 16];
            for (int g = 0; g < n / block; g++) scale[g] = decode_scale(scales, t, i / block + g, up);
            dequantize_strip(dtype, block, t->packed + i / 2, scale, n, values, i);
        }
    }
}

/* Decode rows to float32 values, or to bf16 where that is exact. */
EXPORT void dequantize(int64_t first, int64_t last, const uint8_t *packed, const void *block_scales,
                       const int8_t *outer, int scales, int64_t width, int64_t rows_per_outer, int dtype,
                       void *values) {
    const struct stored t = {packed, block_scales, outer, width, rows_per_outer};
#define BY_SCALES(dtype)                                                                                   \
    switch (scales) {                                                                                      \
        case E4M3_POW2: dequantize_rows(dtype, E4M3_POW2, 16, first, last, &t, values); break;             \
        case E8M0: dequantize_rows(dtype, E8M0, 32, first, last, &t, values); break;                       \
        default: dequantize_rows(dtype, FOUND, 16, first, last, &t, values); break;                        \
    }
    if (dtype == FLOAT32) {
        BY_SCALES(FLOAT32)
    } else {
        BY_SCALES(BFLOAT16)
    }
}

/* Unpack the bytes [first, last) into two codes each. */
EXPORT void unpack_codes(int64_t first, int64_t last, const uint8_t *packed, uint8_t *codes) {
    unpack(packed + first, last - first, codes + 2 * first);
}
