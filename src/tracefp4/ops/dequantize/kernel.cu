/* dequantize on a GPU: a thread decodes WORDS_PER_THREAD words of eight codes, neighbours beside each other.
 *
 * Defines: SCHEME, the numbers of ops/rules.py; DTYPE, `enum dtype` of the values, BFLOAT16 only where it is exact;
 * WORDS_PER_THREAD, loads under way at once. */

#include "decoding.cuh"
#include "scaling.h"

constexpr struct scheme RULES = {SCHEME};
enum { WORDS_PER_BLOCK = RULES.block / 8 };

/* blocks_per_outer: how many blocks share an entry of `outer`. */
KERNEL dequantize(const uint32_t *packed, const uint8_t *block_scales, const void *outer, int num_blocks,
                  int blocks_per_outer, void *values) {
    await_earlier();
    uint32_t word[WORDS_PER_THREAD], byte[WORDS_PER_THREAD];
    int64_t first = (int64_t)blockIdx.x * blockDim.x * WORDS_PER_THREAD + threadIdx.x;
    for (int i = 0; i < WORDS_PER_THREAD; i++) {
        int64_t at = first + i * (int64_t)blockDim.x, block = at / WORDS_PER_BLOCK;
        word[i] = block < num_blocks ? __ldcs(packed + at) : 0;
        byte[i] = block < num_blocks ? block_scales[block] : 0;
    }
    for (int i = 0; i < WORDS_PER_THREAD; i++) {
        int64_t at = first + i * (int64_t)blockDim.x, block = at / WORDS_PER_BLOCK;
        if (block >= num_blocks) return;
        float unit, decode_scale, factor;
        struct outer scale = read_outer(&RULES, outer, (uint32_t)block / (uint32_t)blocks_per_outer);
        decode_bytes(&RULES, 1, byte + i, scale, &unit, &decode_scale, &factor);
        store_values<(enum dtype)DTYPE, true>(word[i], decode_scale, values, at);
    }
}
