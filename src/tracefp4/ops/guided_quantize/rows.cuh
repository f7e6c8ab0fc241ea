/* Rows of a matrix over the threads of a block, and the scales that a row is rounded under: the parts that kernels of
 * guided_quantize share. A thread takes blocks of the scheme as blocks.cuh has them.
 *
 * Defines: those of blocks.cuh; PER_ROW, 1 if every row has an outer scale of its own. */

#ifndef TRACEFP4_ROWS_CUH
#define TRACEFP4_ROWS_CUH

#include "blocks.cuh"
#include "decoding.cuh"
#include "syndromes.cuh"

constexpr bool IS_EXACT = RULES.order == POW2 || RULES.order == MX; /* values are bf16 numbers */

/* Where a thread stands: `threads` of them take a row, a power of two up to a warp, or the whole thread block. */
struct place {
    int thread, threads;
    int slot, num_slots; /* which row of the thread block, and how many it has */
    int64_t first, row;  /* the row of slot 0, and this one */
    int is_there;
};

DEVICE struct place place_of(int num_rows, int threads) {
    struct place place;
    int slots = (int)(blockDim.x / (uint32_t)threads);
    place.thread = (int)(threadIdx.x % (uint32_t)threads);
    place.threads = threads;
    place.slot = (int)(threadIdx.x / (uint32_t)threads);
    place.first = (int64_t)blockIdx.x * slots;
    place.num_slots = (int)smaller(slots, num_rows - place.first);
    place.row = place.first + place.slot;
    place.is_there = place.slot < place.num_slots;
    return place;
}

/* The largest of one number per thread of a row, in all of these. Whole warps call it, or the whole thread block where a
 * row takes that. */
DEVICE int32_t most_of_row(const struct place &place, int32_t mine) {
    if (place.threads > WARP) return most_of_block(mine);
    for (int with = place.threads / 2; with; with /= 2) mine = most(mine, __shfl_xor_sync(FULL_MASK, mine, with));
    return mine;
}

/* An outer scale as it is stored. */
union stored {
    int8_t exponent;
    float number;
};

DEVICE union stored load_outer(const void *outer, int64_t index) {
    union stored stored;
    if (RULES.order == POW2)
        stored.exponent = static_cast<const int8_t *>(outer)[index];
    else
        stored.number = static_cast<const float *>(outer)[index];
    return stored;
}

DEVICE void store_outer(union stored stored, void *outer, int64_t index) {
    if (RULES.order == POW2)
        static_cast<int8_t *>(outer)[index] = stored.exponent;
    else
        static_cast<float *>(outer)[index] = stored.number;
}

/* Whether a scheme can have stored it. */
DEVICE int is_possible(union stored stored) {
    if (RULES.order == POW2) return stored.exponent >= MIN_EXPONENT && stored.exponent <= MAX_EXPONENT;
    return stored.number >= 0.0f && bits_of(stored.number) < INF_BITS;
}

/* The outer scale that a row finds for itself; `values` is the first block of this thread. */
DEVICE union stored own_outer(const struct place &place, const struct values &values, const void *x, int num_blocks) {
    union stored stored;
    int32_t largest = 0;
    int64_t first = place.row * num_blocks;
    if (place.is_there && place.thread < num_blocks) largest = finite_amax(values);
    for (int b = place.thread + place.threads; place.is_there && b < num_blocks; b += place.threads)
        largest = most(largest, finite_amax(load_block(x, first + b)));
    write_outer(&RULES, float_of((uint32_t)most_of_row(place, largest)), &stored, 0);
    return stored;
}

/* The lowest bits of eight codes. */
DEVICE uint32_t lowest_of_codes(uint32_t word) {
    word &= 0x11111111;
    word = (word | word >> 3) & 0x03030303;
    word = (word | word >> 6) & 0x000F000F;
    return (word | word >> 12) & 0xFF;
}

/* Put the lowest bits of a block's codes into its row of bits in shared memory. */
DEVICE void put_lowest(const struct encoded &encoded, uint32_t *bits, int b) {
    uint8_t *to = reinterpret_cast<uint8_t *>(bits) + b * (BLOCK / 8);
    for (int w = 0; w < BLOCK / 8; w++) to[w] = (uint8_t)lowest_of_codes(encoded.word[w]);
}

/* Put the lowest bits of the scale bytes of the rows of a thread block into rows of bits in shared memory. */
DEVICE void put_lowest_of_scales(const struct place &place, const uint8_t *block_scales, int num_blocks, uint32_t *bits) {
    int stride = words_of_bits(num_blocks), num_pieces = (num_blocks + PIECE - 1) / PIECE;
    uint16_t *pieces = reinterpret_cast<uint16_t *>(bits);
    for (int p = (int)threadIdx.x; p < place.num_slots * num_pieces; p += (int)blockDim.x) {
        int slot = p / num_pieces, piece = p % num_pieces;
        const uint8_t *from = block_scales + (place.first + slot) * num_blocks;
        uint32_t found = 0;
        for (int j = 0; j < PIECE && piece * PIECE + j < num_blocks; j++)
            found |= (uint32_t)(from[piece * PIECE + j] & 1) << j;
        pieces[slot * stride * 2 + piece] = (uint16_t)found;
    }
}

/* Store what a block became: values, its byte, and codes one a byte unless these are not wanted. */
DEVICE void store_rounded(const struct encoded &encoded, int64_t block, void *values, uint8_t *block_scales,
                          uint8_t *codes) {
    block_scales[block] = (uint8_t)encoded.byte;
    for (int w = 0; w < BLOCK / 8; w++)
        store_values<INPUT, IS_EXACT>(encoded.word[w], encoded.decode_scale, values, block * (BLOCK / 8) + w);
    if (!codes) return;
    uint32_t four[BLOCK / 4];
    for (int q = 0; q < BLOCK / 4; q++) {
        uint32_t half = encoded.word[q / 2] >> 16 * (q % 2) & 0xFFFF;
        half = (half | half << 8) & 0x00FF00FF;
        four[q] = (half | half << 4) & 0x0F0F0F0F;
    }
    uint4 *to = reinterpret_cast<uint4 *>(codes) + block * (BLOCK / 16);
    for (int q = 0; q < BLOCK / 16; q++)
        to[q] = make_uint4(four[4 * q], four[4 * q + 1], four[4 * q + 2], four[4 * q + 3]);
}

#endif
