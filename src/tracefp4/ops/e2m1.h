/* The numbers of FP4 blocks in C, for processors and, through NVRTC, for GPUs: how a float32 becomes an E2M1 code, how an E4M3 byte becomes a float32 and
 * back, how bf16 and fp16 inputs are read. Shared by the kernels of the ops; the definitions are the torch code
 * of formats/grid.py and formats/scaling.py, which these functions equal bit for bit.
 *
 * The kernels are plain loops without branches inside, which compilers turn into vector instructions; measured, that
 * needed no intrinsics. Two habits matter: intermediate arrays hold 32-bit entries, because a loop that mixes widths
 * is split into short vectors, and conditions become masks (`choose`). Never compile this with -ffast-math: it
 * changes results.
 *
 * INLINE functions with arguments such as `dtype` are called with constants, and each call becomes its own copy. */

#ifndef TRACEFP4_E2M1_H
#define TRACEFP4_E2M1_H

#if defined(__CUDACC_RTC__) || defined(TRACEFP4_EMULATED)
#define TRACEFP4_ON_DEVICE
#endif

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#endif
#ifdef __cplusplus
#define restrict __restrict__
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* How elements are stored. */
enum dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
/* Which code a value halfway between two codes takes. */
enum tie { TO_EVEN = 0, TOWARD_ZERO = 1 };
/* Which code a zero takes: the one of its sign, 0, or 8. */
enum zero { KEPT = 0, POSITIVE = 1, NEGATIVE = 2 };

enum {
    INF_BITS = 0x7F800000, /* integer order of magnitude bits: finite < INF_BITS <= Inf and NaN */
    MAGNITUDE_BITS = 0x7FFFFFFF,
    NAN_BITS = 0x7FF00000, /* what torch gives for an E4M3 NaN */
    BF16_NAN_BITS = 0xFFFF, /* what torch gives for a NaN rounded to bf16 */
    NAN_BYTE = 0x7F,
    MAX_SCALE_BITS = 0x43E00000, /* 448 as a float32 */
    MIN_EXPONENT = -110,
    MAX_EXPONENT = 116,
#ifdef TRACEFP4_ON_DEVICE
    STRIP = 32, /* a thread of a GPU works on one block, in registers */
    LANES = 1
#else
    /* Elements a kernel works on at a time: their intermediate arrays stay in the first-level cache. */
    STRIP = 512,
    LANES = 16 /* elements rounded together; block sizes are multiples of it */
#endif
};

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* condition ? yes : no, without a branch: compilers turn a ?: on long expressions into jumps, and jumps keep a loop
 * from becoming vector code. */
INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no) {
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

/* How many of the `left` elements the next strip takes. */
INLINE int strip_length(int64_t left) { return left < STRIP ? (int)left : STRIP; }

/* 2^k as a float32, for k in [-126, 127]. */
INLINE float power_of_two(int32_t k) { return float_of((uint32_t)(k + 127) << 23); }

/* The bits of element i, widened exactly to float32. */
INLINE uint32_t load_bits(const void *x, enum dtype dtype, int64_t i) {
    if (dtype == FLOAT32) return ((const uint32_t *)x)[i];
    uint32_t half = ((const uint16_t *)x)[i];
    if (dtype == BFLOAT16) return half << 16;
    /* fp16: moving the fields by 13 bits leaves the exponent 112 too small. Subnormals count 2^-24; no step makes a
     * float32 subnormal, which a caller's thread may have set to be flushed to 0. */
    uint32_t magnitude = half & 0x7FFF, subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = choose(magnitude < 0x400, subnormal, (magnitude << 13) + (112u << 23));
    bits |= magnitude >= 0x7C00 ? INF_BITS : 0;
    return bits | (half & 0x8000) << 16;
}

/* The magnitude code 0..7 of z >= 0: how many midpoints between codewords z lies above. A midpoint itself goes
 * to the even code, so every second comparison includes it. Saturates; NaN gives 0. */
INLINE int32_t magnitude_code(float z, enum tie tie) {
    if (tie == TOWARD_ZERO)
        return (z > 0.25f) + (z > 0.75f) + (z > 1.25f) + (z > 1.75f) + (z > 2.5f) + (z > 3.5f) + (z > 5.0f);
    return (z > 0.25f) + (z >= 0.75f) + (z > 1.25f) + (z >= 1.75f) + (z > 2.5f) + (z >= 3.5f) + (z > 5.0f);
}

/* The magnitude of a code 0..7: twice it is max(code, 2 code - 4, 4 code - 16). */
INLINE float code_magnitude(int32_t code) {
    return 0.5f * (float)most(most(code, 2 * code - 4), 4 * code - 16);
}

/* The magnitude nearest to z >= 0, not NaN, where no code is needed: the anchor of formats/grid.py. */
INLINE float rounded_magnitude(float z, enum tie tie) {
    if (tie == TOWARD_ZERO) return code_magnitude(magnitude_code(z, tie));
    z = z < 6.0f ? z : 6.0f;
    float anchor = z * 4194300.0f;
    anchor = anchor > 4194304.0f ? anchor : 4194304.0f;
    return (z + anchor) - anchor;
}

/* The E4M3 byte nearest to u in [0, 448], ties to even. Adding 2^14 leaves a multiple of 2^-9, the spacing of
 * the subnormals; the others are rounded in the bits, and a carry runs into the exponent as it should. */
INLINE uint32_t encode_e4m3(float u) {
    uint32_t bits = bits_of(u);
    uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
    uint32_t subnormal = bits_of(u + 0x1p14f) - bits_of(0x1p14f);
    return choose(u < 0x1p-6f, subnormal, normal);
}

/* The value of an E4M3 byte; 0x7F and 0xFF are NaN. */
INLINE float decode_e4m3(uint32_t byte) {
    uint32_t magnitude = byte & 0x7F;
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-9f), normal = (magnitude << 20) + (120u << 23);
    uint32_t bits = choose(magnitude == NAN_BYTE, NAN_BITS, choose(magnitude < 8, subnormal, normal));
    return float_of(bits | (byte & 0x80) << 24);
}

/* The value of an E8M0 byte, 2^(byte - 127); 0xFF is NaN. */
INLINE float decode_e8m0(uint32_t byte) {
    return float_of(choose(byte == 0xFF, NAN_BITS, choose(byte == 0, 0x00400000, byte << 23)));
}

/* The smallest k with amax <= limit * 2^k in the range of outer exponents, from the bits of amax; 0 for 0.
 * A fraction above that of the limit carries into the exponent. */
INLINE int32_t pow2_exponent(int32_t amax_bits, float limit) {
    int32_t limit_bits = (int32_t)bits_of(limit);
    int32_t k = ((amax_bits + 0x7FFFFF - (limit_bits & 0x7FFFFF)) >> 23) - (limit_bits >> 23);
    return amax_bits ? least(most(k, MIN_EXPONENT), MAX_EXPONENT) : 0;
}

/* A decode scale as a divisor: infinity where it is 0 or NaN, so that finite x / divisor is 0 there. */
INLINE float divisor_of(float decode_scale) {
    return float_of(choose(decode_scale > 0.0f, bits_of(decode_scale), INF_BITS));
}

/* The bf16 bits of a float32, nearest even. */
INLINE uint16_t bf16_bits(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)choose((bits & MAGNITUDE_BITS) > INF_BITS, BF16_NAN_BITS, rounded);
}

/* The magnitude bits of the largest of `block` elements from element i on. */
INLINE int32_t block_amax_bits(const void *x, enum dtype dtype, int64_t i, int block) {
    int32_t lane[LANES] = {0};
    for (int start = 0; start < block; start += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] = most(lane[j], (int32_t)(load_bits(x, dtype, i + start + j) & MAGNITUDE_BITS));
    for (int j = 0; j < 8; j++) lane[j] = most(lane[j], lane[j + 8]);
    for (int j = 0; j < 4; j++) lane[j] = most(lane[j], lane[j + 4]);
    return most(most(lane[0], lane[2]), most(lane[1], lane[3]));
}

/* The magnitude bits of the largest element of a row that lies in a finite block of 16. */
INLINE int32_t row_amax_bits(const void *x, enum dtype dtype, int64_t start, int64_t width) {
    int32_t largest = 0;
    for (int64_t i = start; i < start + width; i++)
        largest = most(largest, (int32_t)(load_bits(x, dtype, i) & MAGNITUDE_BITS));
    if (largest < INF_BITS) return largest;
    largest = 0;
    for (int64_t i = start; i < start + width; i += 16) {
        int32_t amax_bits = block_amax_bits(x, dtype, i, 16);
        if (amax_bits < INF_BITS) largest = most(largest, amax_bits);
    }
    return largest;
}

/* Put two codes into each byte, the even index in the low nibble; n is the number of bytes. */
INLINE void pack(const uint8_t *code, int64_t n, uint8_t *packed) {
    for (int64_t j = 0; j < n; j++) {
        uint16_t pair;
        memcpy(&pair, code + 2 * j, sizeof pair);
        packed[j] = (uint8_t)(pair | pair >> 4);
    }
}

/* Take two codes out of each byte; n is the number of bytes. */
INLINE void unpack(const uint8_t *packed, int64_t n, uint8_t *code) {
    for (int64_t j = 0; j < n; j++) {
        uint16_t pair = (uint16_t)((packed[j] | packed[j] << 4) & 0x0F0F);
        memcpy(code + 2 * j, &pair, sizeof pair);
    }
}

/* Call f(dtype, ...) with the dtype as a constant. */
#define FOR_DTYPE(dtype, f, ...)                         \
    switch (dtype) {                                     \
        case FLOAT32: f(FLOAT32, __VA_ARGS__); break;    \
        case BFLOAT16: f(BFLOAT16, __VA_ARGS__); break;  \
        default: f(FLOAT16, __VA_ARGS__); break;         \
    }

#endif
