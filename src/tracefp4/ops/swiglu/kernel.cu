/* SwiGLU of a row per thread block, and rounding of the result to FP4.
 *
 * Defines: those of bf16_rows.cuh; DTYPE is bf16. */

#include "bf16_rows.cuh"

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

/* R(R(silu(gate)) * up) of pairs. */
DEVICE uint32_t gated(uint32_t gate, uint32_t up) {
    uint32_t open = bf16x2_of(silu(low_bf16(gate)), silu(high_bf16(gate)));
    return bf16x2_of(low_bf16(open) * low_bf16(up), high_bf16(open) * high_bf16(up));
}

/* gate_up [.., 2 width], out [.., width]; `outer`, `block_scales` and `packed` may all be null. */
KERNEL __launch_bounds__(512) gate_rows(const void *gate_up, int width, void *out, void *outer, uint8_t *block_scales,
                                        uint8_t *packed) {
    int num_blocks = num_blocks_of(width);
    int64_t first = (int64_t)blockIdx.x * num_blocks;
    struct row row;
    for (int p = 0; p < PARTS; p++) {
        if (block_of(p) >= num_blocks) continue;
        struct values gate = load_block(gate_up, 2 * first + block_of(p));
        struct values up = load_block(gate_up, 2 * first + num_blocks + block_of(p));
        for (int w = 0; w < WORDS; w++) row.part[p].word[w] = gated(gate.word[w], up.word[w]);
        store_values(row.part[p], out, first + block_of(p));
    }
    if (packed) quantize_row(row, width, out, outer, block_scales, packed);
}
