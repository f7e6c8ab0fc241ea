/* The factor of an RMS norm: 1 / sqrt(mean of squares + epsilon) in float64, rounded to float32. Squares of bf16 are exact
 * there, and sums and the root so nearly that neither their order nor a last bit shows in the factor. */

#ifndef TRACEFP4_NORMS_CUH
#define TRACEFP4_NORMS_CUH

#include "device.cuh"

DEVICE double from_lane(double x, int with) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t low = __shfl_xor_sync(FULL_MASK, (uint32_t)bits, with);
    bits = low | (uint64_t)__shfl_xor_sync(FULL_MASK, (uint32_t)(bits >> 32), with) << 32;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The sum over a team of lanes, a power of two, in all of them. */
DEVICE double sum_of_team(double x, int team) {
    for (int with = team / 2; with; with /= 2) x += from_lane(x, with);
    return x;
}

/* The sum of squares of a pair of bf16. */
DEVICE double squares_of(uint32_t pair) {
    double low = (double)low_bf16(pair), high = (double)high_bf16(pair);
    return low * low + high * high;
}

DEVICE float norm_factor(double squares, int width, float epsilon) {
    return (float)rsqrt(squares * (1.0 / (double)width) + (double)epsilon);
}

/* R(weight * R(x * factor)) of a pair of bf16. */
DEVICE uint32_t normed(uint32_t pair, float factor, uint32_t weight) {
    uint32_t x = bf16x2_of(low_bf16(pair) * factor, high_bf16(pair) * factor);
    return bf16x2_of(low_bf16(x) * low_bf16(weight), high_bf16(x) * high_bf16(weight));
}

/* R(weight * (x * factor)) of a pair of bf16 under two float32 weights. */
DEVICE uint32_t normed_once(uint32_t pair, float factor, float2 weight) {
    return bf16x2_of(low_bf16(pair) * factor * weight.x, high_bf16(pair) * factor * weight.y);
}

#endif
