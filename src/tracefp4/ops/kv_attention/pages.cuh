/* K and V of a page as the A operand of matrix products, 16 tokens at a time. FP4 pages are in fragment order
 * (formats/fragments.py): a lane's 16 bytes hold its part of four blocks. bf16 pages are in plain order and their
 * fragments are read as matrices.
 *
 * A code at bits {15, 11..9} reads as its value * 2^-14 in fp16; times an E4M3 scale that is exact in fp16, down to its last
 * subnormal. What is left, 2^14 and the outer scale, goes to the float32 sums.
 *
 * Defines: HEAD_DIM, a multiple of 64 up to 256; IS_FP4. */

#ifndef TRACEFP4_KV_PAGES_CUH
#define TRACEFP4_KV_PAGES_CUH

#include "device.cuh"

enum {
    TILE = 16,
    BLOCKS = HEAD_DIM / 16,
    CODE_BYTES = TILE * HEAD_DIM / 2,
    SCALE_BYTES = TILE * BLOCKS,
    ROW_BYTES = 2 * HEAD_DIM, /* of bf16 */
    CODE_EXPONENT = IS_FP4 ? 14 : 0,
    PART_BYTES = IS_FP4 ? CODE_BYTES + SCALE_BYTES : TILE * ROW_BYTES, /* one tile of K or of V in shared memory */
    TILE_BYTES = 2 * PART_BYTES
};

enum {
    COPIED_BYTES = IS_FP4 ? CODE_BYTES : TILE * ROW_BYTES, /* codes or values of one tile of K or of V */
    SCALE_PIECES = SCALE_BYTES / 16,
    COPYING = WARP / 2 /* lanes that copy K; the others copy V */
};
static_assert(COPIED_BYTES % (16 * COPYING) == 0 && SCALE_PIECES <= COPYING, "every lane copies as many pieces");

/* Where a lane copies from: its first piece of K or of V in the tiles of one kv head, and of scales, which are null for bf16
 * and for lanes without any. */
struct pages {
    const uint8_t *codes, *scales;
};

/* The pages of a kv head, whose first tile has the number `first`. */
DEVICE struct pages pages_of(const uint8_t *keys, const uint8_t *key_scales, const uint8_t *values,
                             const uint8_t *value_scales, int64_t first, int lane) {
    int is_of_v = lane / COPYING, piece = lane % COPYING;
    struct pages pages = {(is_of_v ? values : keys) + first * COPIED_BYTES + 16 * piece, nullptr};
    if (IS_FP4 && piece < SCALE_PIECES)
        pages.scales = (is_of_v ? value_scales : key_scales) + first * SCALE_BYTES + 16 * piece;
    return pages;
}

/* Where the first piece of a lane goes in a tile. */
DEVICE int own_place(int lane) { return lane / COPYING * PART_BYTES + 16 * (lane % COPYING); }

/* Begin to copy a tile of the kv head to shared memory, by one warp; `to` is the lane's own place. */
DEVICE void copy_tile(shared_place to, const struct pages &pages, uint32_t tile, int lane) {
    const uint8_t *from = pages.codes + (uint64_t)tile * COPIED_BYTES;
#pragma unroll
    for (int r = 0; r < COPIED_BYTES / (16 * COPYING); r++) {
        int i = lane % COPYING + r * COPYING, row = i / (ROW_BYTES / 16), piece = i % (ROW_BYTES / 16);
        /* bf16 rows lie so that eight rows at one place are in different banks */
        int moved = IS_FP4 ? 0 : (piece ^ (row & 7)) - piece;
        copy_async(to + 16 * (r * COPYING + moved), from + 16 * r * COPYING, 1);
    }
    if (IS_FP4 && lane % COPYING < SCALE_PIECES) copy_async(to + CODE_BYTES, pages.scales + (uint64_t)tile * SCALE_BYTES, 1);
}

/* The codes of both halves of a word as pairs of fp16, times 2^-14. Bits of a byte from the highest: h3 l3 h2 h1 h0 l2 l1 l0.
 * Those of l are in their places but for a shift; those of h too, when the last three are moved by two. */
struct codes {
    uint32_t low[2], high[2]; /* l and h of the lower byte of a half, and of the upper */
};
DEVICE struct codes codes_of(uint32_t word) {
    const uint32_t ALL = 0x8E008E00u;
    uint32_t moved = chosen_bits(0x0E0E0E0Eu, word >> 2, word);
    return {{word << 9 & ALL, moved << 8 & ALL}, {word << 1 & ALL, moved & ALL}};
}

DEVICE uint32_t word_of(uint4 four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

/* Give the A operand of every block of 16 dims of K, tokens as rows, to use(block, a). */
template <class Use> DEVICE void for_keys(const uint8_t *part, int lane, Use use) {
    uint32_t a[4];
    if (IS_FP4) {
        const uint4 *words = reinterpret_cast<const uint4 *>(part);
        const uint2 *scales = reinterpret_cast<const uint2 *>(part + CODE_BYTES + lane / 4 * (2 * BLOCKS));
#pragma unroll
        for (int u = 0; u < BLOCKS / 4; u++) {
            uint4 four = words[u * WARP + lane];
            uint2 bytes = scales[u];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                struct codes codes = codes_of(word_of(four, c));
                uint32_t pairs = c < 2 ? bytes.x : bytes.y;
                uint32_t two = c % 2 ? f16x2_of_upper_e4m3x2(pairs) : f16x2_of_e4m3x2(pairs);
                uint32_t of_g = twice_low(two), of_g_8 = twice_high(two);
                a[0] = mul_f16x2(codes.low[0], of_g);
                a[1] = mul_f16x2(codes.high[0], of_g_8);
                a[2] = mul_f16x2(codes.low[1], of_g);
                a[3] = mul_f16x2(codes.high[1], of_g_8);
                use(4 * u + c, a);
            }
        }
        return;
    }
    int row = lane % 16, right = lane / 16;
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) {
        load_matrices(a, part + row * ROW_BYTES + ((2 * k + right) ^ (row & 7)) * 16);
        use(k, a);
    }
}

/* The same of V, dims as rows and tokens as columns. */
template <class Use> DEVICE void for_values(const uint8_t *part, int lane, Use use) {
    uint32_t a[4];
    if (IS_FP4) {
        const uint4 *words = reinterpret_cast<const uint4 *>(part);
        const uint4 *scales = reinterpret_cast<const uint4 *>(part + CODE_BYTES + lane % 4 * (4 * BLOCKS));
#pragma unroll
        for (int u = 0; u < BLOCKS / 4; u++) {
            uint4 four = words[u * WARP + lane], bytes = scales[u];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                struct codes codes = codes_of(word_of(four, c));
                uint32_t scale = word_of(bytes, c);
                uint32_t first = f16x2_of_e4m3x2(scale), second = f16x2_of_upper_e4m3x2(scale);
                a[0] = mul_f16x2(codes.low[0], first);
                a[1] = mul_f16x2(codes.low[1], first);
                a[2] = mul_f16x2(codes.high[0], second);
                a[3] = mul_f16x2(codes.high[1], second);
                use(4 * u + c, a);
            }
        }
        return;
    }
    int row = lane / 16 * 8 + lane % 8, right = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) {
        load_matrices_transposed(a, part + row * ROW_BYTES + ((2 * k + right) ^ (row & 7)) * 16);
        use(k, a);
    }
}

#endif
