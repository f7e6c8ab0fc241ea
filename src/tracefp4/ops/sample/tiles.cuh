/* What head.cu leaves for draw.cu: bf16 logits [N, tiles * TILE], -Inf beyond the vocabulary, and of every tile of every
 * row its largest logit and the sum of exponentials below it. */

#ifndef TRACEFP4_TILES_CUH
#define TRACEFP4_TILES_CUH

#include "device.cuh"

enum { TILE = 128 /* logits of a row that are looked at together */ };
#define MINUS_INFINITY float_of(0xFF800000u)

struct weights {
    float largest; /* among the numbers; -Inf if there are none */
    float sum;     /* of 2^((l - largest) * sharpness); NaN where a logit is NaN or +Inf */
};

/* What turns a difference of logits into a power of two: log2(e) / temperature, 1 for greedy rows. */
DEVICE float sharpness_of(double temperature) {
    const double log2e = 1.4426950408889634;
    double found = temperature == 0.0 ? log2e : log2e / temperature;
    return found < 0x1p100 ? (float)found : 0x1p100f;
}

DEVICE float float_of_bf16(uint32_t bits) { return float_of(bits << 16); }

#endif
