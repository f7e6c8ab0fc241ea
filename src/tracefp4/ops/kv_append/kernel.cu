/* kv_append on a GPU: rows that are bytes already. */

#include "places.cuh"

/* FP4 rows [tokens, heads, blocks] in plain order; a thread moves a block. */
KERNEL append_blocks(const uint8_t *packed, const uint8_t *block_scales, const int64_t *slots, int num_tokens,
                     int num_heads, int num_blocks, int num_slots, int order, uint8_t *to_packed, uint8_t *to_scales) {
    await_earlier();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    struct block_of_rows at = place_of(i, num_heads, num_blocks);
    if (at.token >= num_tokens) return;
    struct pages pages = {to_packed, to_scales, order, num_slots, num_blocks};
    uint2 codes = reinterpret_cast<const uint2 *>(packed)[i];
    put_block(pages, at.head, slot_of(slots, at.token, num_slots), at.block, codes, block_scales[i]);
}

/* Rows [tokens, heads, width] of `Unit` to pages [heads, slots, width]; a thread moves one. */
template <class Unit>
DEVICE void append_units(const void *rows, const int64_t *slots, int num_tokens, int num_heads, int width, int num_slots,
                         void *pages) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / width;
    int token = (int)(row / num_heads);
    if (token >= num_tokens) return;
    int64_t slot = slot_of(slots, token, num_slots), at = (row % num_heads * num_slots + slot) * width + i % width;
    if (slot < 0) return;
    static_cast<Unit *>(pages)[at] = static_cast<const Unit *>(rows)[i];
}

KERNEL append_16_bytes(const void *rows, const int64_t *slots, int num_tokens, int num_heads, int width, int num_slots,
                       void *pages) {
    await_earlier();
    append_units<uint4>(rows, slots, num_tokens, num_heads, width, num_slots, pages);
}

KERNEL append_bytes(const void *rows, const int64_t *slots, int num_tokens, int num_heads, int width, int num_slots,
                    void *pages) {
    await_earlier();
    append_units<uint8_t>(rows, slots, num_tokens, num_heads, width, num_slots, pages);
}
