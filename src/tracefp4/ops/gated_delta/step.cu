/* A decode step of the gated delta rule, and norm and gate of its output. A thread block takes a value head of a sequence
 * and streams its state through registers once, 16 bytes a load: TEAM threads share a row of S, which is all that a row
 * needs, so nothing is waited for before the norm. Sums over keys follow `sum_over_keys` of reference.py.
 *
 * Defines: KEY_DIM and VALUE_DIM, multiples of 64; STATE, `enum dtype` of the state: FLOAT32 or BFLOAT16. */

#include "norms.cuh"
#include "slots.cuh"

enum {
    THREADS = 256,
    TEAM = 8,
    UNIT = STATE == FLOAT32 ? 4 : 8,        /* elements in 16 bytes */
    UNITS = KEY_DIM / (TEAM * UNIT),       /* of a lane in a row */
    ROWS = THREADS / TEAM,                 /* at once */
    PASSES = VALUE_DIM / ROWS
};

/* What a lane holds of a row over keys. */
struct part {
    float x[UNITS * UNIT];
};

/* The part of lane `lane` of a float32 row. */
DEVICE struct part load_part(const float *row, int lane) {
    struct part part;
    for (int u = 0; u < UNITS; u++)
        for (int e = 0; e < UNIT; e += 4) {
            float4 four = *reinterpret_cast<const float4 *>(row + (u * TEAM + lane) * UNIT + e);
            float *to = part.x + u * UNIT + e;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    return part;
}

DEVICE void widen(uint4 from, float *to) {
    uint32_t word[4] = {from.x, from.y, from.z, from.w};
    for (int w = 0; w < 4; w++) {
        if (STATE == FLOAT32) {
            to[w] = float_of(word[w]);
        } else {
            to[2 * w] = low_bf16(word[w]);
            to[2 * w + 1] = high_bf16(word[w]);
        }
    }
}

DEVICE uint4 narrow(const float *from) {
    uint32_t word[4];
    for (int w = 0; w < 4; w++)
        word[w] = STATE == FLOAT32 ? bits_of(from[w]) : bf16x2_of(from[2 * w], from[2 * w + 1]);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* The sum of x y over the row that TEAM neighbouring threads share, in all of them. */
DEVICE float sum_over_row(const struct part &x, const struct part &y) {
    float sum = x.x[0] * y.x[0];
    for (int e = 1; e < UNITS * UNIT; e++) sum += x.x[e] * y.x[e];
    for (int with = TEAM / 2; with; with /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, with);
    return sum;
}

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

/* Norm and gate of the output of a head; every warp finds the same factor. */
DEVICE void store_gated(const float *of_row, const uint32_t *z, const uint32_t *norm, float epsilon, uint32_t *out) {
    double squares = 0.0;
    for (int w = (int)threadIdx.x % WARP; w < VALUE_DIM / 2; w += WARP)
        squares += squares_of(bf16x2_of(of_row[2 * w], of_row[2 * w + 1]));
    float factor = norm_factor(sum_of_team(squares, WARP), VALUE_DIM, epsilon);
    int w = (int)threadIdx.x;
    if (w >= VALUE_DIM / 2) return;
    uint32_t x = normed(bf16x2_of(of_row[2 * w], of_row[2 * w + 1]), factor, norm[w]);
    out[w] = bf16x2_of(low_bf16(x) * silu(low_bf16(z[w])), high_bf16(x) * silu(high_bf16(z[w])));
}

/* Rows of `z` lie z_stride words apart; `group` value heads share a key head. */
KERNEL __launch_bounds__(THREADS, 2) step_heads(const float *q, const float *k, const uint16_t *v, const float *decay,
                                                const float *beta, const uint32_t *z, const uint32_t *norm,
                                                const int64_t *slots, int z_stride, int num_heads, int group,
                                                int num_slots, float epsilon, uint4 *states, uint32_t *out) {
    SHARED float of_row[VALUE_DIM];
    int head = (int)blockIdx.x, seq = (int)blockIdx.y, lane = (int)threadIdx.x % TEAM, row = (int)threadIdx.x / TEAM;
    int64_t slot = state_slot(slots, seq, num_slots), item = (int64_t)seq * num_heads + head;
    out += item * (VALUE_DIM / 2);
    if (slot < 0) {
        if (threadIdx.x < VALUE_DIM / 2) out[threadIdx.x] = 0;
        return;
    }
    uint4 *state = states + (slot * num_heads + head) * VALUE_DIM * (KEY_DIM / UNIT);
    uint4 stored[PASSES][UNITS];
    for (int p = 0; p < PASSES; p++)
        for (int u = 0; u < UNITS; u++)
            stored[p][u] = load_once(state + (row + p * ROWS) * (KEY_DIM / UNIT) + u * TEAM + lane);
    int64_t shared_by = (int64_t)seq * (num_heads / group) + head / group;
    struct part key = load_part(k + shared_by * KEY_DIM, lane), query = load_part(q + shared_by * KEY_DIM, lane);
    float of_decay = decay[item], of_beta = beta[item];
    for (int p = 0; p < PASSES; p++) {
        struct part s;
        for (int u = 0; u < UNITS; u++) widen(stored[p][u], s.x + u * UNIT);
        for (int e = 0; e < UNITS * UNIT; e++) s.x[e] *= of_decay;
        float value = float_of((uint32_t)v[item * VALUE_DIM + row + p * ROWS] << 16);
        float delta = (value - sum_over_row(s, key)) * of_beta;
        for (int e = 0; e < UNITS * UNIT; e++) s.x[e] += key.x[e] * delta;
        float o = sum_over_row(s, query);
        if (lane == 0) of_row[row + p * ROWS] = o;
        for (int u = 0; u < UNITS; u++)
            __stcs(state + (row + p * ROWS) * (KEY_DIM / UNIT) + u * TEAM + lane, narrow(s.x + u * UNIT));
    }
    __syncthreads();
    store_gated(of_row, z + (int64_t)seq * z_stride + head * (VALUE_DIM / 2), norm, epsilon, out);
}
