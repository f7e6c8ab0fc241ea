/* What a rounding could not represent, counted; formats/saturation.py is the definition. Threads take blocks of the scheme
 * in turn, and every warp leaves its counts: values clipped, scales clamped, scales floored.
 *
 * Defines: those of blocks.cuh; LOOKS_AT_ALL, 1 where any block with a large value counts and not only those whose scale
 * byte lies at an end; IS_STATIC, 1 where the outer scale does not follow from the values. */

#include "blocks.cuh"

enum { LARGEST_BYTE = 0x7E, COARSE_BYTE = 0x03 };
constexpr bool IS_E4M3 = RULES.order != MX;

/* Whether a block may be clamped or floored, by its byte. */
DEVICE bool is_at_an_end(int byte) {
    if (!IS_E4M3) return false;
    bool is_small = byte <= most(COARSE_BYTE, RULES.least_byte);
    if (RULES.underflow_byte) is_small = (is_small && byte) || byte == RULES.underflow_byte;
    return is_small || (IS_STATIC && byte == LARGEST_BYTE);
}

KERNEL count_ends(const void *x, const uint8_t *block_scales, const void *outer, const uint8_t *rows, int num_blocks,
                  int blocks_per_row, int blocks_per_outer, int *counts) {
    await_earlier();
    int clipped = 0, clamped = 0, floored = 0, step = (int)(gridDim.x * blockDim.x);
    for (int block = (int)(blockIdx.x * blockDim.x + threadIdx.x); block < num_blocks; block += step) {
        uint32_t byte = block_scales[block];
        bool is_suspect = is_at_an_end((int)byte);
        if ((!LOOKS_AT_ALL && !is_suspect) || (rows && !rows[block / blocks_per_row])) continue;
        struct values values = load_block(x, block);
        int32_t amax_bits = amax_of(values);
        if (amax_bits >= INF_BITS) continue;
        float unit, decode_scale, factor, amax = float_of((uint32_t)amax_bits);
        struct outer scale = read_outer(&RULES, outer, block / blocks_per_outer);
        decode_bytes(&RULES, 1, &byte, scale, &unit, &decode_scale, &factor);
        float limit = decode_scale * 7.0f;
        if (!is_suspect && !(amax >= limit)) continue;
        if (limit > 0.0f)
            for (int j = 0; j < BLOCK; j++) clipped += float_of(bits_at(values.word, j) & MAGNITUDE_BITS) >= limit;
        if (!IS_E4M3) continue;
        float raw = raw_block_scale((enum order)RULES.order, amax, scale);
        clamped += byte == LARGEST_BYTE && raw > 464.0f;
        floored += amax_bits && (int)encode_e4m3(fminf(raw, 448.0f)) < most(1, RULES.least_byte);
    }
    for (int with = 1; with < WARP; with *= 2) {
        clipped += __shfl_xor_sync(FULL_MASK, clipped, with);
        clamped += __shfl_xor_sync(FULL_MASK, clamped, with);
        floored += __shfl_xor_sync(FULL_MASK, floored, with);
    }
    if (threadIdx.x % WARP) return;
    int *own = counts + 3 * ((int)(blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    own[0] = clipped;
    own[1] = clamped;
    own[2] = floored;
}
