/* Norm (if there is one) and rotation of the queries and keys of a token, a head by a team of TEAM lanes, each of which
 * has eight values of its lower half and the eight of the upper half that they turn with.
 *
 * Defines: TEAM, lanes of a head, 1 to 32, a power of two: a head has 16 TEAM values; NORMS, whether there is a norm. */

#include "norms.cuh"

enum { HALF = 8 * TEAM, WIDTH = 16 * TEAM };

struct eight {
    uint32_t word[4];
};

DEVICE struct eight load_eight(const uint16_t *at) {
    uint4 four = *reinterpret_cast<const uint4 *>(at);
    struct eight eight = {{four.x, four.y, four.z, four.w}};
    return eight;
}

DEVICE void store_eight(const struct eight &eight, uint16_t *at) {
    *reinterpret_cast<uint4 *>(at) = make_uint4(eight.word[0], eight.word[1], eight.word[2], eight.word[3]);
}

/* R(R(x cos) + R(y sin)) of pairs. */
DEVICE uint32_t turned(uint32_t x, uint32_t cosine, uint32_t y, uint32_t sine) {
    uint32_t along = bf16x2_of(low_bf16(x) * low_bf16(cosine), high_bf16(x) * high_bf16(cosine));
    uint32_t across = bf16x2_of(low_bf16(y) * low_bf16(sine), high_bf16(y) * high_bf16(sine));
    return bf16x2_of(low_bf16(along) + low_bf16(across), high_bf16(along) + high_bf16(across));
}

/* Token t's queries are at q + t * q_stride, num_q heads of WIDTH, and its keys at k + t * k_stride; cosines and sines are
 * tables [table_size, WIDTH]. A position outside of them gives NaN. */
KERNEL __launch_bounds__(256) norm_and_rotate(const uint16_t *q, const uint16_t *k, int q_stride, int k_stride,
                                              const uint16_t *q_weight, const uint16_t *k_weight, const uint16_t *cosines,
                                              const uint16_t *sines, int table_size, const int64_t *positions,
                                              int num_tokens, int num_q, int num_k, float epsilon, uint16_t *q_out,
                                              uint16_t *k_out) {
    await_earlier();
    int num_heads = num_q + num_k, part = (int)threadIdx.x % TEAM * 8;
    int64_t item = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / TEAM;
    int64_t token = (uint32_t)item / (uint32_t)num_heads; /* so many heads fit into no memory */
    int head = (int)(item - token * num_heads), is_there = token < num_tokens, is_query = head < num_q;
    /* all that is read is under way before anything is computed */
    int64_t position = is_there ? positions[token] : 0;
    struct eight low = {{0, 0, 0, 0}}, high = low, low_weight = low, high_weight = low;
    if (is_there) {
        const uint16_t *from = is_query ? q + token * q_stride + head * WIDTH
                                        : k + token * k_stride + (head - num_q) * WIDTH;
        low = load_eight(from + part);
        high = load_eight(from + HALF + part);
    }
    if (NORMS) {
        const uint16_t *weight = is_query ? q_weight : k_weight;
        low_weight = load_eight(weight + part);
        high_weight = load_eight(weight + HALF + part);
    }
    int is_known = position >= 0 && position < table_size;
    const uint16_t *cosine = cosines + (is_known ? position : 0) * WIDTH, *sine = sines + (cosine - cosines);
    struct eight low_cosine = load_eight(cosine + part), high_cosine = load_eight(cosine + HALF + part);
    struct eight low_sine = load_eight(sine + part), high_sine = load_eight(sine + HALF + part);
    if (NORMS) {
        double squares = 0.0;
        for (int w = 0; w < 4; w++) squares += squares_of(low.word[w]) + squares_of(high.word[w]);
        float factor = norm_factor(sum_of_team(squares, TEAM), WIDTH, epsilon);
        for (int w = 0; w < 4; w++) {
            low.word[w] = normed(low.word[w], factor, low_weight.word[w]);
            high.word[w] = normed(high.word[w], factor, high_weight.word[w]);
        }
    }
    if (!is_there) return;
    for (int w = 0; w < 4; w++) {
        uint32_t x = low.word[w], y = high.word[w];
        low.word[w] = is_known ? turned(x, low_cosine.word[w], y ^ 0x80008000u, low_sine.word[w]) : 0x7FFF7FFFu;
        high.word[w] = is_known ? turned(y, high_cosine.word[w], x, high_sine.word[w]) : 0x7FFF7FFFu;
    }
    uint16_t *to = is_query ? q_out + (token * num_q + head) * WIDTH : k_out + (token * num_k + head - num_q) * WIDTH;
    store_eight(low, to + part);
    store_eight(high, to + HALF + part);
}
