/* Rounding to nearest, with what a codec keeps of codes and scales written in the same pass. keeping.py states the layouts.
 *
 * Defines: those of rows.cuh; PAYLOAD and KEPT_SCALES, how many low bits of a code and of a scale byte are kept, 4 and 8
 * for all of them and 0 for syndromes. TEAM: how many neighbouring threads have a block of the code together, where the
 * syndromes of a warp fill whole bytes of its row, and CODE_BITS of each; 0 where syndromes go through shared memory. */

#include "rows.cuh"

/* The two low bits of eight codes. */
DEVICE uint32_t low2_of_codes(uint32_t word) {
    word &= 0x33333333;
    word = (word | word >> 2) & 0x0F0F0F0F;
    word = (word | word >> 4) & 0x00FF00FF;
    return (word | word >> 8) & 0xFFFF;
}

/* Keep the codes of a block, unless syndromes are kept: rows have no padding, since they are whole blocks. */
DEVICE void keep_codes(const struct encoded &encoded, int64_t block, uint8_t *payload) {
    for (int w = 0; w < BLOCK / 8; w++) {
        int64_t at = block * (BLOCK / 8) + w;
        if (PAYLOAD == 4) reinterpret_cast<uint32_t *>(payload)[at] = encoded.word[w];
        if (PAYLOAD == 2) reinterpret_cast<uint16_t *>(payload)[at] = (uint16_t)low2_of_codes(encoded.word[w]);
        if (PAYLOAD == 1) payload[at] = (uint8_t)lowest_of_codes(encoded.word[w]);
    }
}

/* Keep the low bits of the scale bytes of the rows of a thread block, which are there once it met a barrier. */
DEVICE void keep_low_bits_of_scales(const struct place &place, const uint8_t *block_scales, int num_blocks,
                                    uint8_t *scales) {
    constexpr int kept = KEPT_SCALES == 1 ? 1 : 2, per_byte = 8 / kept;
    int row_bytes = (num_blocks + per_byte - 1) / per_byte;
    for (int i = (int)threadIdx.x; i < place.num_slots * row_bytes; i += (int)blockDim.x) {
        const uint8_t *from = block_scales + (place.first + i / row_bytes) * num_blocks;
        uint32_t byte = 0;
        for (int j = 0, g = i % row_bytes * per_byte; j < per_byte && g < num_blocks; j++, g++)
            byte |= (uint32_t)(from[g] & ((1 << kept) - 1)) << j * kept;
        scales[place.first * row_bytes + i] = (uint8_t)byte;
    }
}

DEVICE int64_t bytes_before(const struct place &place, const struct code &code, int width) {
    return place.first * ((blocks_in(code, width) * code.num_bits + 7) / 8);
}

/* Keep the syndromes of the 32 blocks of a warp: lanes show each other theirs, and make a byte each. `b` is the block of
 * this lane, without ones where the row has ended. */
DEVICE void keep_syndromes(const struct code &code, const struct encoded &encoded, const struct place &place, int b,
                           int num_blocks, uint8_t *payload) {
    constexpr int team = TEAM ? TEAM : 1, num_bits = TEAM ? CODE_BITS : 1, num_bytes = WARP / team * num_bits / 8;
    int lane = (int)threadIdx.x % WARP, from = lane % team * BLOCK, first = (b - lane) / WARP * num_bytes;
    int row_bytes = ((num_blocks + team - 1) / team * num_bits + 7) / 8;
    uint64_t syndrome = 0;
    for (int p = 0; p < BLOCK / PIECE; p++) {
        uint32_t piece = lowest_of_codes(encoded.word[2 * p]) | lowest_of_codes(encoded.word[2 * p + 1]) << 8;
        syndrome ^= part_of_syndrome(code, from + p * PIECE, piece);
    }
    syndrome = xor_of_team(syndrome, team);
    for (int i = lane; i - lane < num_bytes; i += WARP) {
        int source = 8 * i / num_bits, bit = 8 * i % num_bits;
        uint64_t low = of_lane(syndrome, source * team), high = of_lane(syndrome, (source + 1) * team);
        if (i < num_bytes && first + i < row_bytes)
            payload[place.row * row_bytes + first + i] = (uint8_t)(low >> bit | high << (num_bits - bit));
    }
}

/* Keep the lowest bits of the scale bytes of the 32 blocks of a warp. */
DEVICE void keep_lowest_of_scales(const struct encoded &encoded, const struct place &place, int b, int num_blocks,
                                  uint8_t *scales) {
    int lane = (int)threadIdx.x % WARP, at = (b - lane) / 8 + lane, row_bytes = (num_blocks + 7) / 8;
    uint32_t bits = __ballot_sync(FULL_MASK, encoded.byte & 1);
    if (lane < WARP / 8 && at < row_bytes) scales[place.row * row_bytes + at] = (uint8_t)(bits >> 8 * lane);
}

/* Round rows to nearest; `threads` of a thread block take each. `scales` is not written where whole bytes are kept:
 * these are `block_scales`. */
KERNEL recorded_rows(const void *x, int num_rows, int width, int threads, const int64_t *code_numbers,
                     const int64_t *scale_code_numbers, void *outer, uint8_t *block_scales, void *values, uint8_t *codes,
                     uint8_t *payload, uint8_t *scales) {
    await_earlier();
    DYNAMIC_SHARED(uint32_t, shared); /* rows of bits of codes, or of scales; then words of their syndromes */
    struct place place = place_of(num_rows, threads);
    struct values of_block; /* the first block of this thread stays in registers */
    int num_blocks = width / BLOCK, slots = (int)blockDim.x / threads;
    if (place.is_there && place.thread < num_blocks) of_block = load_block(x, place.row * num_blocks + place.thread);
    struct outer scale;
    if (PER_ROW) {
        union stored stored = own_outer(place, of_block, x, num_blocks);
        if (place.is_there && place.thread == 0) store_outer(stored, outer, place.row);
        scale = read_outer(&RULES, &stored, 0);
    } else {
        scale = read_outer(&RULES, outer, 0);
    }
    struct code code;
    if (PAYLOAD == 0) code = read_code(code_numbers);
    int is_wide = threads >= WARP, lane = is_wide ? (int)threadIdx.x % WARP : 0; /* whole warps stay together */
    for (int b = place.thread; place.is_there && b - lane < num_blocks; b += threads) {
        int64_t block = place.row * num_blocks + b;
        struct encoded encoded = {};
        if (b < num_blocks) {
            if (b != place.thread) of_block = load_block(x, block);
            encoded = encode(of_block, x, block, scale, nullptr);
            store_rounded(encoded, block, values, block_scales, codes);
            keep_codes(encoded, block, payload);
            if (PAYLOAD == 0 && TEAM == 0) put_lowest(encoded, shared + place.slot * words_of_bits(width), b);
        }
        if (TEAM) keep_syndromes(code, encoded, place, b, num_blocks, payload);
        if (KEPT_SCALES == 1 && is_wide) keep_lowest_of_scales(encoded, place, b, num_blocks, scales);
    }
    if ((PAYLOAD || TEAM) && (KEPT_SCALES == 8 || (KEPT_SCALES == 1 && is_wide))) return;
    __syncthreads();
    if (PAYLOAD == 0 && TEAM == 0) {
        int stride = words_of_bits(width);
        write_syndromes(code, shared, stride, place.num_slots, width, shared + slots * stride,
                        payload + bytes_before(place, code, width));
        __syncthreads();
    }
    if (KEPT_SCALES == 0) {
        struct code scale_code = read_code(scale_code_numbers);
        int stride = words_of_bits(num_blocks);
        put_lowest_of_scales(place, block_scales, num_blocks, shared);
        __syncthreads();
        write_syndromes(scale_code, shared, stride, place.num_slots, num_blocks, shared + slots * stride,
                        scales + bytes_before(place, scale_code, num_blocks));
    } else if (KEPT_SCALES == 2 || (KEPT_SCALES == 1 && !is_wide)) {
        keep_low_bits_of_scales(place, block_scales, num_blocks, scales);
    }
}

/* The largest magnitude of each row, among its finite blocks of 16; a thread block a row. */
KERNEL row_maxima(const void *x, int width, float *amax) {
    await_earlier();
    float largest = row_maximum(x, blockIdx.x, width);
    if (threadIdx.x == 0) amax[blockIdx.x] = largest;
}
