/* encode_syndromes on a GPU: a thread block takes some rows, brings their lowest bits into shared memory, and encodes
 * them from there (syndromes.cuh). */

#include "syndromes.cuh"

/* The lowest bits of 4 bytes. */
DEVICE uint32_t lowest_bits(uint32_t four) { return (four & 0x01010101) * 0x10204080 >> 28; }

/* The lowest bits of up to 16 bytes, `n` of them. */
DEVICE uint32_t piece_of(const uint8_t *codes, int n) {
    uint32_t piece = 0;
    for (int j = 0; j < n; j++) piece |= (uint32_t)(codes[j] & 1) << j;
    return piece;
}

/* is_aligned: rows and `codes` begin at multiples of 16 bytes. */
KERNEL encode_rows(const uint8_t *codes, const int64_t *numbers, int num_rows, int width, int rows_per_block,
                   int is_aligned, uint8_t *syndromes) {
    await_earlier();
    DYNAMIC_SHARED(uint32_t, shared);
    struct code code = read_code(numbers);
    int stride = words_of_bits(width), num_pieces = (width + PIECE - 1) / PIECE;
    int64_t first = (int64_t)blockIdx.x * rows_per_block;
    int num_slots = (int)smaller(rows_per_block, num_rows - first);
    uint32_t *words = shared + rows_per_block * stride;
    uint16_t *pieces = reinterpret_cast<uint16_t *>(shared);
    for (int p = (int)threadIdx.x; p < num_slots * num_pieces; p += (int)blockDim.x) {
        int slot = p / num_pieces, piece = p % num_pieces;
        const uint8_t *at = codes + (first + slot) * width + piece * PIECE;
        uint32_t bits;
        if (is_aligned) {
            uint4 four = load_once(reinterpret_cast<const uint4 *>(at));
            bits = lowest_bits(four.x) | lowest_bits(four.y) << 4 | lowest_bits(four.z) << 8 | lowest_bits(four.w) << 12;
        } else {
            bits = piece_of(at, least(PIECE, width - piece * PIECE));
        }
        pieces[slot * stride * 2 + piece] = (uint16_t)bits;
    }
    __syncthreads();
    int64_t row_bytes = (blocks_in(code, width) * code.num_bits + 7) / 8;
    write_syndromes(code, shared, stride, num_slots, width, words, syndromes + first * row_bytes);
}
