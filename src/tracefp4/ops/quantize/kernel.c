/* quantize in C: one sweep over the rows. The definition is reference.py.
 *
 * Every function works on the rows or bytes [first, last) of whole, contiguous tensors, so threads share nothing
 * that is written. The width of a row is a multiple of the block size. */

#include "../scaling.h"

/* Quantize rows. rows_per_outer: how many rows share each outer scale given in `outer`, or 0 to find one for every
 * row and write it there. has_scales: keep the bytes in `block_scales`, but for the NaN byte where a block is not
 * finite, and only choose codes. */
EXPORT void quantize_rows(int64_t first, int64_t last, const struct scheme *scheme, const void *x, int dtype,
                          int64_t width, int64_t rows_per_outer, void *outer, int has_scales, uint8_t *block_scales,
                          uint8_t *packed) {
    for (int64_t row = first; row < last; row++) {
        int64_t start = row * width, end = start + width;
        if (rows_per_outer == 0) write_outer(scheme, row_amax_of((enum dtype)dtype, x, start, width), outer, row);
        struct outer scale = read_outer(scheme, outer, rows_per_outer ? row / rows_per_outer : row);
        for (int64_t i = start; i < end; i += STRIP) {
            struct strip strip;
            uint32_t byte[BLOCKS];
            read_strip(scheme, x, (enum dtype)dtype, i, end - i, &strip);
            if (has_scales)
                read_block_scales(scheme, &strip, block_scales, byte);
            else
                find_block_scales(scheme, &strip, scale, byte);
            encode_strip(scheme, &strip, scale, byte, block_scales, packed);
        }
    }
}

/* Pack codes 0..15, two a byte, into the bytes [first, last). */
EXPORT void pack_codes(int64_t first, int64_t last, const uint8_t *codes, uint8_t *packed) {
    pack(codes + 2 * first, last - first, packed + first);
}
