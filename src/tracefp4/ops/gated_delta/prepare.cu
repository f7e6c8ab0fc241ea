/* What a decode step of gated delta layers does before the rule: causal convolution over the last tokens, silu, lengths of
 * queries and keys, gates. A warp takes a head of a sequence and moves that head's part of the convolution state on.
 *
 * Defines: KEY_DIM and VALUE_DIM, multiples of 64; TAPS, at least 2. */

#include "norms.cuh"
#include "slots.cuh"

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Channels of a head, two to a word; a lane holds words lane, lane + 32, ... */
template <int WORDS> struct channels {
    uint32_t word[WORDS];
};

/* R(silu(R(conv))) of the head whose words begin at `first` of `width` in a row. All that is read is under way before
 * anything is written. */
template <int WORDS>
DEVICE struct channels<WORDS> convolve(const uint32_t *now, const uint32_t *taps, uint32_t *conv, int first, int width) {
    struct channels<WORDS> found;
    uint32_t x[WORDS][TAPS], tap[WORDS][TAPS];
    conv += first + (int)threadIdx.x % WARP, taps += first + (int)threadIdx.x % WARP;
    for (int w = 0; w < WORDS; w++)
        for (int t = 0; t < TAPS; t++) {
            x[w][t] = t < TAPS - 1 ? conv[t * width + WARP * w] : now[first + (int)threadIdx.x % WARP + WARP * w];
            tap[w][t] = taps[t * width + WARP * w];
        }
    for (int w = 0; w < WORDS; w++) {
        float low = low_bf16(x[w][0]) * low_bf16(tap[w][0]), high = high_bf16(x[w][0]) * high_bf16(tap[w][0]);
        for (int t = 1; t < TAPS; t++) {
            low += low_bf16(x[w][t]) * low_bf16(tap[w][t]), high += high_bf16(x[w][t]) * high_bf16(tap[w][t]);
            conv[(t - 1) * width + WARP * w] = x[w][t];
        }
        uint32_t sum = bf16x2_of(low, high);
        found.word[w] = bf16x2_of(silu(low_bf16(sum)), silu(high_bf16(sum)));
    }
    return found;
}

/* Write a query or a key at the length `scale`. */
DEVICE void store_of_length(const struct channels<KEY_DIM / 64> &x, float scale, float *to) {
    double squares = 0.0;
    for (int w = 0; w < KEY_DIM / 64; w++) squares += squares_of(x.word[w]);
    float factor = (float)(1.0 / sqrt(sum_of_team(squares, WARP) + (double)1e-6f));
    for (int w = 0; w < KEY_DIM / 64; w++) {
        int at = (int)threadIdx.x % WARP + WARP * w;
        float low = low_bf16(x.word[w]) * factor, high = high_bf16(x.word[w]) * factor;
        reinterpret_cast<float2 *>(to)[at] = make_float2(low * scale, high * scale);
    }
}

/* A block takes some heads of sequence y. Rows of `mixed` lie mixed_stride words apart, those of a and b gate_stride
 * elements. */
KERNEL __launch_bounds__(128) prepare_heads(const uint32_t *mixed, const uint16_t *a, const uint16_t *b,
                                            const uint32_t *taps, const float *a_log, const float *dt_bias,
                                            const int64_t *slots, int mixed_stride, int a_stride, int b_stride,
                                            int num_key_heads, int num_heads, int num_slots, float scale,
                                            uint32_t *conv, float *q, float *k, uint32_t *v, float *decay, float *beta) {
    await_earlier();
    int lane = (int)threadIdx.x % WARP, seq = (int)blockIdx.y;
    int head = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP), value = head - 2 * num_key_heads;
    if (value >= num_heads) return; /* the whole warp */
    int64_t slot = state_slot(slots, seq, num_slots);
    int width = (2 * num_key_heads * KEY_DIM + num_heads * VALUE_DIM) / 2;
    const uint32_t *now = mixed + (int64_t)seq * mixed_stride;
    conv += (slot < 0 ? 0 : slot) * (TAPS - 1) * width;
    if (value < 0) {
        float *to = (head < num_key_heads ? q : k) + ((int64_t)seq * num_key_heads + head % num_key_heads) * KEY_DIM;
        struct channels<KEY_DIM / 64> found = {};
        if (slot >= 0) found = convolve<KEY_DIM / 64>(now, taps, conv, head * (KEY_DIM / 2), width);
        store_of_length(found, head < num_key_heads ? scale : 1.0f, to);
        return;
    }
    int64_t out = (int64_t)seq * num_heads + value;
    float of_a = float_of((uint32_t)a[(int64_t)seq * a_stride + value] << 16) + dt_bias[value], of_rate = a_log[value];
    float of_b = float_of((uint32_t)b[(int64_t)seq * b_stride + value] << 16);
    struct channels<VALUE_DIM / 64> found = {};
    if (slot >= 0)
        found = convolve<VALUE_DIM / 64>(now, taps, conv, num_key_heads * KEY_DIM + value * (VALUE_DIM / 2), width);
    for (int w = 0; w < VALUE_DIM / 64; w++) v[out * (VALUE_DIM / 2) + lane + WARP * w] = found.word[w];
    if (lane) return;
    decay[out] = slot < 0 ? 0.0f : expf(-expf(of_rate) * softplus(of_a));
    beta[out] = slot < 0 ? 0.0f : low_bf16(bf16x2_of(sigmoid(of_b), 0.0f));
}
