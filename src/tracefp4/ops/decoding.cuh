/* From codes to values on a GPU, eight codes at a time; formats/grid.py is the definition. */

#ifndef TRACEFP4_DECODING_CUH
#define TRACEFP4_DECODING_CUH

#include "device.cuh"

/* Eight codes times a scale in bf16, where the scale and the products are bf16 numbers: E4M3 times a power of two, or
 * E8M0. The bytes of a magnitude's bf16 bits are looked up, four codes at once. */
DEVICE uint4 bf16_values(uint32_t codes, float scale) {
    uint32_t by = bits_of(scale) >> 16, pair[4];
    by |= by << 16;
    for (int h = 0; h < 2; h++) {
        uint32_t pick = (codes & 0x77777777) >> 16 * h & 0xFFFF, signs = (codes & 0x88888888) >> 16 * h & 0xFFFF;
        uint32_t low = __byte_perm(0xC0800000, 0xC0804000, pick), high = __byte_perm(0x3F3F3F00, 0x40404040, pick);
        /* a product is two shifts: what they have in common carries into no sign */
        uint32_t first = signs * 0x01001000 & 0x80008000, second = signs * 0x00010010 & 0x80008000;
        pair[2 * h] = mul_bf16x2(__byte_perm(low, high, 0x5140) | first, by);
        pair[2 * h + 1] = mul_bf16x2(__byte_perm(low, high, 0x7362) | second, by);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* The value of one code, rounded once. */
DEVICE float value_of_code(uint32_t code, float scale) {
    return float_of(bits_of(code_magnitude((int32_t)(code & 7))) | (code & 8) << 28) * scale;
}

/* Store eight values as float32 or bf16 at element 8 * at, 16 bytes at a time. is_exact: the scale is a bf16 number, and
 * so are all products. */
template <enum dtype dtype, bool is_exact> DEVICE void store_values(uint32_t codes, float scale, void *values, int64_t at) {
    if (dtype == BFLOAT16 && is_exact) {
        static_cast<uint4 *>(values)[at] = bf16_values(codes, scale);
        return;
    }
    uint32_t bits[8];
    for (int j = 0; j < 8; j++) bits[j] = bits_of(value_of_code(codes >> 4 * j & 15, scale));
    if (dtype == FLOAT32) {
        static_cast<uint4 *>(values)[2 * at] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        static_cast<uint4 *>(values)[2 * at + 1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
        return;
    }
    for (int j = 0; j < 8; j++) bits[j] = bf16_bits(float_of(bits[j]));
    static_cast<uint4 *>(values)[at] =
        make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
}

#endif
