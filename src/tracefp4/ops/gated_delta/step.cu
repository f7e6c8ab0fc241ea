/* A decode step of the gated delta rule, and norm and gate of its output. A thread block takes a value head of a sequence
 * and streams its state once, 16 bytes a load: TEAM threads share a row of S, which is all that a row needs, so nothing
 * is waited for before the norm. All of a state is under way to shared memory before the first row is computed; a thread
 * takes what it copied itself, and neither registers nor a barrier limit how many bytes are under way. Sums over keys
 * follow `sum_over_keys` of reference.py.
 *
 * Defines: KEY_DIM and VALUE_DIM, multiples of 64; STATE, `enum dtype` of the state: FLOAT32 or BFLOAT16; THREADS of a
 * block, at least VALUE_DIM. Dynamic shared memory: a state. */

#include "norms.cuh"
#include "slots.cuh"

enum {
    TEAM = 8,
    UNIT = STATE == FLOAT32 ? 4 : 8,        /* elements in 16 bytes */
    UNITS = KEY_DIM / (TEAM * UNIT),       /* of a lane in a row */
    ROWS = THREADS / TEAM,                 /* at once */
    PASSES = VALUE_DIM / ROWS,
    LINE = KEY_DIM / UNIT,                 /* units in a row */
    PAIRS = VALUE_DIM / 2,                 /* words of an output in bf16 */
    RESIDENT = 768 / THREADS               /* blocks that share a multiprocessor: 80 registers a thread */
};
static_assert(PASSES <= TEAM, "each lane brings the value of one row");

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

/* The word of thread w of a head's output: norm, and the gate z. Whole warps call it. */
DEVICE uint32_t gated(const float *of_row, int w, uint32_t z, uint32_t norm, float epsilon) {
    double squares = 0.0;
    for (int i = 0; i < PAIRS / WARP; i++) {
        const float *of_pair = of_row + 2 * (w % WARP + i * WARP);
        squares += squares_of(bf16x2_of(of_pair[0], of_pair[1]));
    }
    float factor = norm_factor(sum_of_team(squares, WARP), VALUE_DIM, epsilon);
    uint32_t x = normed(bf16x2_of(of_row[2 * w], of_row[2 * w + 1]), factor, norm);
    return bf16x2_of(low_bf16(x) * silu(low_bf16(z)), high_bf16(x) * silu(high_bf16(z)));
}

/* A block takes value head x of those that share key head y, of sequence z. Rows of `z` lie z_stride words apart. */
KERNEL __launch_bounds__(THREADS, RESIDENT) step_heads(const float *q, const float *k, const uint16_t *v,
                                                       const float *decay, const float *beta, const uint32_t *z,
                                                       const uint32_t *norm, const int64_t *slots, int z_stride,
                                                       int num_slots, float epsilon, uint4 *states, uint32_t *out) {
    await_earlier();
    DYNAMIC_SHARED(uint4, staged);
    SHARED float of_row[VALUE_DIM];
    int seq = (int)blockIdx.z, num_heads = (int)(gridDim.x * gridDim.y), thread = (int)threadIdx.x;
    int head = (int)(blockIdx.y * gridDim.x + blockIdx.x), lane = thread % TEAM, row = thread / TEAM;
    int64_t item = (int64_t)seq * num_heads + head, shared_by = (int64_t)seq * gridDim.y + blockIdx.y;
    int64_t slot = state_slot(slots, seq, num_slots);
    out += item * PAIRS + thread;
    if (slot < 0) {
        if (thread < PAIRS) *out = 0;
        return;
    }
    struct part key = load_part(k + shared_by * KEY_DIM, lane), query = load_part(q + shared_by * KEY_DIM, lane);
    uint4 *state = states + ((slot * num_heads + head) * VALUE_DIM + row) * LINE + lane;
    staged += thread;
    for (int p = 0; p < PASSES; p++) {
        for (int u = 0; u < UNITS; u++)
            copy_async(staged + (p * UNITS + u) * THREADS, state + p * ROWS * LINE + u * TEAM, 1);
        commit_copies();
    }
    float of_decay = decay[item], of_beta = beta[item];
    uint32_t values = v[item * VALUE_DIM + row + lane % PASSES * ROWS]; /* of row p in lane p */
    uint32_t gate = 0, weight = 0;
    if (thread < PAIRS) gate = z[(int64_t)seq * z_stride + head * PAIRS + thread], weight = norm[thread];
    for (int p = 0; p < PASSES; p++) {
        /* waiting inside of the loop keeps the loads above before it */
        if (p == 0) await_copies<PASSES / 2>();
        if (p == PASSES / 2) await_copies<0>();
        struct part s;
        for (int u = 0; u < UNITS; u++) widen(staged[(p * UNITS + u) * THREADS], s.x + u * UNIT);
        for (int e = 0; e < UNITS * UNIT; e++) s.x[e] *= of_decay;
        float value = float_of(__shfl_sync(FULL_MASK, values, thread % WARP - lane + p) << 16);
        float delta = (value - sum_over_row(s, key)) * of_beta;
        for (int e = 0; e < UNITS * UNIT; e++) s.x[e] += key.x[e] * delta;
        float o = sum_over_row(s, query);
        if (lane == 0) of_row[row + p * ROWS] = o;
        for (int u = 0; u < UNITS; u++) __stcs(state + p * ROWS * LINE + u * TEAM, narrow(s.x + u * UNIT));
    }
    __syncthreads();
    if (thread < PAIRS) *out = gated(of_row, thread, gate, weight, epsilon);
}
