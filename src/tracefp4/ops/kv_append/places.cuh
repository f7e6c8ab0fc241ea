/* Where the bytes of a block of 16 codes go in cache pages, in plain or in fragment order; the definition of the latter is
 * formats/fragments.py. A block's bytes belong to one token in both, so tokens are appended without a race. */

#ifndef TRACEFP4_PLACES_CUH
#define TRACEFP4_PLACES_CUH

#include "device.cuh"

/* How pages are laid out; device.py counts on these numbers. */
enum order_of_pages { PLAIN = 0, FRAGMENTS_OF_K = 1, FRAGMENTS_OF_V = 2 };

/* Pages of one layer and one of K and V: [heads, slots, blocks] of 8 code bytes, and as many scale bytes. */
struct pages {
    uint8_t *packed, *block_scales;
    int order, num_slots, num_blocks;
};

/* Where block i of rows [tokens, heads, blocks] belongs; 2^32 blocks fit into no memory. */
struct block_of_rows {
    int token, head, block;
};

DEVICE struct block_of_rows place_of(int64_t i, int num_heads, int num_blocks) {
    uint32_t row = (uint32_t)i / (uint32_t)num_blocks, token = row / (uint32_t)num_heads;
    return {(int)token, (int)(row - token * (uint32_t)num_heads), (int)((uint32_t)i - row * (uint32_t)num_blocks)};
}

/* The bits of four bytes of two codes in their places; the definition is formats/fragments.py. */
DEVICE uint32_t spread(uint32_t four) { return (four & 0x87878787) | (four << 3 & 0x40404040) | (four >> 1 & 0x38383838); }

/* Write a block of one head at a slot, if it has one: codes 0..7 in x, 8..15 in y, the first in the lowest bits. */
DEVICE void put_block(const struct pages &pages, int head, int64_t slot, int block, uint2 codes, uint32_t scale) {
    if (slot < 0) return;
    int num_blocks = pages.num_blocks, token = (int)(slot % 16), row = token % 8, upper = token / 8;
    int64_t first = ((int64_t)head * pages.num_slots + (pages.order == PLAIN ? slot : slot - token)) * num_blocks;
    uint8_t *packed = pages.packed + first * 8, *scales = pages.block_scales + first;
    if (pages.order == PLAIN) {
        reinterpret_cast<uint2 *>(packed)[block] = codes;
        scales[block] = (uint8_t)scale;
        return;
    }
    /* bytes of codes c and c + 8, c even and c odd */
    uint32_t even = spread((codes.x & 0x0F0F0F0F) | (codes.y & 0x0F0F0F0F) << 4);
    uint32_t odd = spread((codes.x >> 4 & 0x0F0F0F0F) | (codes.y & 0xF0F0F0F0));
    uint8_t *chunk = packed + block / 4 * 512 + block % 4 * 4 + upper;
    for (int c = 0; c < 8; c++) {
        uint8_t byte = (uint8_t)((c % 2 ? odd : even) >> 8 * (c / 2));
        if (pages.order == FRAGMENTS_OF_K)
            chunk[(row * 4 + c / 2) * 16 + c % 2 * 2] = byte;
        else
            chunk[(c * 4 + row / 2) * 16 + token % 2 * 2] = byte;
    }
    if (pages.order == FRAGMENTS_OF_K)
        scales[(row * num_blocks + block) * 2 + upper] = (uint8_t)scale;
    else
        scales[(row / 2 * num_blocks + block) * 4 + upper * 2 + token % 2] = (uint8_t)scale;
}

/* The slot of a token, negative where it has none; one beyond the pages ends the kernel with an error, as an index of
 * torch does. */
DEVICE int64_t slot_of(const int64_t *slots, int token, int num_slots) {
    int64_t slot = slots[token];
    if (slot >= num_slots) stop_here();
    return slot;
}

#endif
