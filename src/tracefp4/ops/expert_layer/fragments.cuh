/* FP4 weights in fragment order (formats/weight_fragments.py) as the A operand of bf16 matrix products.
 *
 * Everything is exact: a code has 2 significant bits, an E4M3 scale 4, their product fits into bf16, and so does every
 * activation. bf16 rather than fp16, because its range also holds E8M0 scales, activations with their power of two, and
 * activations that are not quantized; the cost in instructions is the same. A code at bits {15, 8..6} reads as its
 * value times 2^-126.
 *
 * Defines: BLOCK, 16 (E4M3 scales) or 32 (E8M0); NT, row tiles of a warp; MT, tiles of 8 tokens. */

#ifndef TRACEFP4_FRAGMENTS_CUH
#define TRACEFP4_FRAGMENTS_CUH

#include "device.cuh"

enum {
    TILE_ROWS = 16,
    GROUP = 64,                     /* columns that a warp reads at once */
    LANE_COLUMNS = 16,              /* of which each lane has so many of a row */
    BF16_NAN = 0x7FC0,
    TWO_TO_119 = (119 + 127) << 7,  /* as bf16 */
    TWO_TO_126 = (126 + 127) << 7,
    PRODUCT_EXPONENT = BLOCK == 16 ? 8 : 0 /* sums have to be multiplied by 2 to this, once more the outer scale */
};

DEVICE uint32_t twice(uint32_t half) { return half * 0x00010001u; }

/* A scale byte as two bf16: s * 2^118 for E4M3, whose bits read as s * 2^-120; 2^(byte - 127) for E8M0. */
DEVICE uint32_t scale_pair(uint32_t byte) {
    if (BLOCK == 16) {
        uint32_t s = mul_bf16x2(mul_bf16x2(twice(byte << 4), twice(TWO_TO_119)), twice(TWO_TO_119));
        return byte == 0x7F ? twice(BF16_NAN) : s;
    }
    return twice(byte << 7 | (((byte + 1) & 0xFE) == 0 ? 0x40 : 0)); /* 0: the subnormal 2^-127; 0xFF: NaN */
}

/* A word of codes and the scales of its two rows as the A operand of a 16 x 16 tile. A product puts a code at two places, its
 * sign where it belongs in one of them, its magnitude in the other; no sum in it carries. */
DEVICE void expand(uint32_t word, const uint32_t (&scale)[2], uint32_t (&a)[4]) {
    const uint32_t BITS = 0x81C081C0u, upper = word >> 8;
    a[0] = (word & 0x000F000Fu) * ((1u << 12) + (1u << 6)) & BITS;
    a[1] = (word & 0x00F000F0u) * ((1u << 8) + (1u << 2)) & BITS;
    a[2] = (upper & 0x000F000Fu) * ((1u << 12) + (1u << 6)) & BITS;
    a[3] = (upper & 0x00F000F0u) * ((1u << 8) + (1u << 2)) & BITS;
    for (int p = 0; p < 4; p++) {
        if (BLOCK == 32) a[p] = mul_bf16x2(a[p], twice(TWO_TO_126)); /* a scale may be as large as 2^127 */
        a[p] = mul_bf16x2(a[p], scale[p % 2]);
    }
}

/* What a lane holds of NT row tiles in one group. */
struct weights {
    uint4 words[NT];
    uint32_t scales[NT];
};

enum { SCALES = 8 * GROUP / BLOCK /* pairs of scale bytes, of rows g and g + 8, in a tile and group */ };

/* The pair that a lane needs. */
DEVICE int scale_of_lane() {
    int lane = (int)threadIdx.x % WARP;
    return lane / 4 * (GROUP / BLOCK) + lane % 4 * LANE_COLUMNS / BLOCK;
}

/* Number of the first group of a row tile: tile `index` of the warp's NT, which are NT / parts of each part of an expert's
 * matrix (gate and up), from row tile `first` of a part on. Tiles beyond the last one repeat it; what they give is not
 * stored. 32 bits are enough for 1 TiB of weights. */
DEVICE int first_group(int index, int expert, int parts, int part_rows, int first, int groups) {
    int of_part = part_rows / TILE_ROWS, tile = least(first + index % (NT / parts), of_part - 1);
    return ((expert * parts + index / (NT / parts)) * of_part + tile) * groups;
}

/* Add the products of one group of columns. tokens(m, half) is eight bf16 of the lane's token of tile m: columns
 * 16j + 8 half on. */
template <class Tokens>
DEVICE void multiply_group(float (&sum)[NT][MT][4], const struct weights &weights, Tokens tokens) {
    uint32_t scale[NT][2];
#pragma unroll
    for (int i = 0; i < NT; i++) {
        scale[i][0] = scale_pair(weights.scales[i] & 0xFF);
        scale[i][1] = scale_pair(weights.scales[i] >> 8);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[NT][2][4];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            expand(half ? weights.words[i].z : weights.words[i].x, scale[i], a[i][0]);
            expand(half ? weights.words[i].w : weights.words[i].y, scale[i], a[i][1]);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            uint4 b = tokens(m, half);
#pragma unroll
            for (int i = 0; i < NT; i++) {
                mma_bf16(sum[i][m], a[i][0], b.x, b.y);
                mma_bf16(sum[i][m], a[i][1], b.z, b.w);
            }
        }
    }
}

/* Which rows a product has: pairs of a token and an expert, sorted by expert. */
struct routes {
    const int *order;   /* [P] number of the pair, token * top_k + slot */
    const int *offsets; /* [E + 1] where the pairs of an expert begin */
    const int *tiles;   /* [.., 2] expert and first pair of every token tile; expert -1 where there is none */
};

struct tile {
    int expert, first, count; /* count <= 8 MT */
};

DEVICE struct tile read_tile(const struct routes &routes, int index) {
    struct tile tile = {routes.tiles[2 * index], routes.tiles[2 * index + 1], 0};
    if (tile.expert >= 0) tile.count = least(8 * MT, routes.offsets[tile.expert + 1] - tile.first);
    return tile;
}

DEVICE void clear(float (&sum)[NT][MT][4]) {
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) sum[i][m][c] = 0.0f;
}

/* R(silu(R(gate))) * R(up), which the caller rounds; R rounds to bf16. Quotients are within two units in the last place. */
DEVICE float swiglu(float gate, float up) {
    uint32_t both = bf16x2_of(gate, up);
    float g = float_of(both << 16), u = float_of(both & 0xFFFF0000u);
    return float_of(bf16x2_of(g * reciprocal_fast(1.0f + expf(-g)), 0.0f) << 16) * u;
}

#endif
