/* Binary codes in C: syndromes of the lowest bits of bytes, and bit strings in bytes. The layout is that of
 * coding/syndrome.py; ops/parity_checks.py is the definition in torch. Shared by the kernels of the ops; those of GPUs read
 * codes as syndromes.cuh has them. */

#ifndef TRACEFP4_SYNDROMES_H
#define TRACEFP4_SYNDROMES_H

#include "e2m1.h"

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#ifndef TRACEFP4_ON_DEVICE
/* A code as ops/parity_checks.py writes it. */
struct code {
    int64_t length, num_bits, num_candidates, max_flips;
    int64_t common; /* the bits that all columns have */
    int64_t column[];
};

/* How many blocks a row of `width` values has; the last one may be shorter. */
INLINE int64_t blocks_of(const struct code *code, int64_t width) { return (width + code->length - 1) / code->length; }

/* Bytes of the syndromes of a row. */
INLINE int64_t syndrome_bytes(const struct code *code, int64_t width) {
    return (blocks_of(code, width) * code->num_bits + 7) / 8;
}

/* The XOR of the columns at which a byte is odd. Columns of up to 31 bits take half the work. */
static uint64_t syndrome_of(const struct code *code, const uint8_t *byte, int n) {
    uint64_t sum = 0;
    if (code->num_bits > 31) {
        for (int j = 0; j < n; j++) sum ^= (uint64_t)code->column[j] & -(uint64_t)(byte[j] & 1);
        return sum;
    }
    uint32_t half = 0;
    for (int j = 0; j < n; j++) half ^= (uint32_t)code->column[j] & -(uint32_t)(byte[j] & 1);
    return half;
}
#endif

/* `num` bits of a bit string from bit `at` on; num is 1 .. 63. */
INLINE uint64_t read_bits(const uint8_t *bytes, int64_t at, int num) {
    uint64_t bits = 0;
    for (int got = 0; got < num;) {
        int shift = (int)((at + got) & 7), take = 8 - shift < num - got ? 8 - shift : num - got;
        bits |= (uint64_t)(bytes[(at + got) >> 3] >> shift & ((1 << take) - 1)) << got;
        got += take;
    }
    return bits;
}

/* Put `num` bits into a bit string that is 0 from bit `at` on. */
INLINE void write_bits(uint8_t *bytes, int64_t at, int num, uint64_t bits) {
    for (int put = 0; put < num;) {
        int shift = (int)((at + put) & 7), take = 8 - shift < num - put ? 8 - shift : num - put;
        bytes[(at + put) >> 3] |= (uint8_t)((bits >> put & ((1u << take) - 1)) << shift);
        put += take;
    }
}

#ifndef TRACEFP4_ON_DEVICE
/* Write the syndromes of rows of `width` bytes, syndrome_bytes(code, width) bytes each; a function of every library that
 * includes this. */
EXPORT void encode_rows(int64_t first, int64_t last, const struct code *code, int64_t width, const uint8_t *codes,
                        uint8_t *syndromes) {
    int64_t row_bytes = syndrome_bytes(code, width), length = code->length;
    int num_bits = (int)code->num_bits;
    for (int64_t row = first; row < last; row++) {
        const uint8_t *at = codes + row * width;
        uint8_t *out = syndromes + row * row_bytes;
        memset(out, 0, (size_t)row_bytes);
        for (int64_t i = 0, bit = 0; i < width; i += length, bit += num_bits)
            write_bits(out, bit, num_bits, syndrome_of(code, at + i, (int)smaller(length, width - i)));
    }
}
#endif

#endif
