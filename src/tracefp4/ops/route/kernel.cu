/* Routing of a token by a warp: its TOP_K experts and their weights.
 *
 * Defines: EXPERTS; TOP_K, up to 32. */

#include "bf16_keys.cuh"

enum { PER_LANE = (EXPERTS + WARP - 1) / WARP, NAN_KEY = 0xFFFF };

DEVICE float sum_of_warp(float x) {
    for (int with = WARP / 2; with; with /= 2) x += __shfl_xor_sync(FULL_MASK, x, with);
    return x;
}

DEVICE uint32_t most_of_warp(uint32_t x) {
    for (int with = WARP / 2; with; with /= 2) {
        uint32_t other = __shfl_xor_sync(FULL_MASK, x, with);
        x = other > x ? other : x;
    }
    return x;
}

/* logits bf16 [num_tokens, EXPERTS], ids [num_tokens, TOP_K], weights bf16 [num_tokens, TOP_K]. */
KERNEL __launch_bounds__(128) route_tokens(const uint16_t *logits, int num_tokens, int renormalizes, int64_t *ids,
                                           uint16_t *weights) {
    await_earlier();
    int lane = (int)threadIdx.x % WARP;
    int64_t token = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (token >= num_tokens) return; /* the whole warp */
    float logit[PER_LANE], total = 0.0f;
    uint32_t candidate[PER_LANE]; /* key, and below it the complement of the id: the lowest id wins among equals */
    for (int i = 0; i < PER_LANE; i++) {
        int expert = lane + WARP * i;
        uint32_t bits = expert < EXPERTS ? logits[token * EXPERTS + expert] : 0xFF80;
        int key = (bits & 0x7FFF) > 0x7F80 ? NAN_KEY : key_of(bits); /* NaN comes first, as in a sort */
        logit[i] = float_of(bits << 16);
        candidate[i] = expert < EXPERTS ? (uint32_t)key << 16 | (uint32_t)(0xFFFF - expert) : 0;
    }
    uint32_t chosen = 0; /* of slot `lane` */
    float largest = 0.0f;
    for (int slot = 0; slot < TOP_K; slot++) {
        uint32_t best = 0;
        for (int i = 0; i < PER_LANE; i++) best = candidate[i] > best ? candidate[i] : best;
        best = most_of_warp(best);
        for (int i = 0; i < PER_LANE; i++) candidate[i] = candidate[i] == best ? 0 : candidate[i];
        chosen = lane == slot ? best : chosen;
        if (slot == 0) largest = best >> 16 == NAN_KEY ? float_of(NAN_BITS) : number_of((int)(best >> 16));
    }
    for (int i = 0; i < PER_LANE; i++) total += lane + WARP * i < EXPERTS ? expf(logit[i] - largest) : 0.0f;
    total = sum_of_warp(total);
    float weight = lane < TOP_K ? expf(number_of((int)(chosen >> 16)) - largest) / total : 0.0f;
    if (renormalizes) weight = weight / sum_of_warp(weight);
    if (lane >= TOP_K) return;
    ids[token * TOP_K + lane] = 0xFFFF - (int)(chosen & 0xFFFF);
    weights[token * TOP_K + lane] = (uint16_t)bf16x2_of(weight, 0.0f);
}
