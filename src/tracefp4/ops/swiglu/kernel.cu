/* SwiGLU of a row per thread block, and rounding of the result to FP4.
 *
 * Defines: those of bf16_rows.cuh; DTYPE is bf16. */

#include "bf16_rows.cuh"

DEVICE float silu(float x) { return x * reciprocal_fast(1.0f + expf(-x)); }

/* R(R(silu(gate)) * up) of pairs. */
DEVICE uint32_t gated(uint32_t gate, uint32_t up) {
    uint32_t open = bf16x2_of(silu(low_bf16(gate)), silu(high_bf16(gate)));
    return bf16x2_of(low_bf16(open) * low_bf16(up), high_bf16(open) * high_bf16(up));
}

/* gate_up [.., 2 width], out [.., width]; `outer`, `block_scales` and `packed` may all be null. */
KERNEL __launch_bounds__(512) gate_rows(const void *gate_up, int width, void *out, void *outer, uint8_t *block_scales,
                                        uint8_t *packed) {
    await_earlier();
    int num_eights = num_eights_of(width);
    int64_t first = (int64_t)blockIdx.x * num_eights;
    struct row row, up;
    for (int p = 0; p < PARTS; p++) {
        if (eight_of(p) >= num_eights) continue;
        row.part[p] = load_eight(gate_up, 2 * first + eight_of(p));
        up.part[p] = load_eight(gate_up, 2 * first + num_eights + eight_of(p));
    }
    for (int p = 0; p < PARTS; p++) {
        if (eight_of(p) >= num_eights) continue;
        for (int w = 0; w < 4; w++) row.part[p].word[w] = gated(row.part[p].word[w], up.part[p].word[w]);
        store_eight(row.part[p], out, first + eight_of(p));
    }
    if (packed) quantize_row(row, width, out, outer, block_scales, packed);
}
