/* Syndromes on a GPU: rows of bits lie in shared memory, and a few neighbouring lanes take a block of a code together, 16
 * bits each at a time, four bits a look-up. Definitions and layout: syndromes.h.
 *
 * A code is int64 numbers as ops/parity_checks.py: numbers_on writes them: `struct code`, then for every four columns the
 * XOR of those at which four bits have ones, for all 16 of these, and what finds a column, or three of them, again. */

#ifndef TRACEFP4_SYNDROMES_CUH
#define TRACEFP4_SYNDROMES_CUH

#include "device.cuh"
#include "syndromes.h"

/* A code where a kernel reads it. */
struct code {
    int length, num_bits, num_candidates, max_flips;
    uint64_t common;
    const int64_t *column;
    const int64_t *sums; /* [whole pieces of the length][4][16] */
    int distance, shift;      /* of columns, and of their tags */
    const int64_t *by_tag;    /* columns */
    const int64_t *positions; /* of these */
    const uint32_t *triples;  /* by half of a sum of columns: the one or three that have it; NULL without a table */
};

enum { PIECE = 16, MEMBERS_OF_CODE = 5 };

DEVICE struct code read_code(const int64_t *numbers) {
    struct code found = {(int)numbers[0], (int)numbers[1], (int)numbers[2], (int)numbers[3], (uint64_t)numbers[4],
                         numbers + MEMBERS_OF_CODE};
    found.sums = found.column + found.length;
    const int64_t *tags = found.sums + (found.length + PIECE - 1) / PIECE * 64;
    found.distance = (int)tags[0];
    found.shift = (int)tags[1];
    found.by_tag = tags + 2;
    found.positions = found.by_tag + found.length;
    const int64_t *entries = found.positions + found.length;
    found.triples = *entries ? reinterpret_cast<const uint32_t *>(entries + 1) : nullptr;
    return found;
}

/* Which of the columns this one is, if it is any. */
DEVICE int tag_of(const struct code &code, uint64_t column) { return (int)(column >> code.shift) & (code.length - 1); }

/* Whether a set of so many columns is the only one of up to `others` columns with its XOR. */
DEVICE int is_alone(const struct code &code, int num, int others) { return num + others < code.distance; }

DEVICE int blocks_in(const struct code &code, int width) { return (width + code.length - 1) / code.length; }

/* 32-bit words of a row of bits in shared memory; the last one may be read beyond a row's end. */
DEVICE int words_of_bits(int num_bits) { return (num_bits + 31) / 32 + 1; }

/* The 16 bits of a row from bit `at` on. */
DEVICE uint32_t piece_at(const uint32_t *bits, int at) {
    uint64_t two = bits[at / 32] | (uint64_t)bits[at / 32 + 1] << 32;
    return (uint32_t)(two >> at % 32) & 0xFFFF;
}

DEVICE uint64_t of_lane(uint64_t value, int source) {
    uint32_t low = __shfl_sync(FULL_MASK, (uint32_t)value, source);
    return low | (uint64_t)__shfl_sync(FULL_MASK, (uint32_t)(value >> 32), source) << 32;
}

DEVICE uint64_t xor_of_lanes(uint64_t mine, int with) {
    uint32_t low = __shfl_xor_sync(FULL_MASK, (uint32_t)mine, with);
    return mine ^ (low | (uint64_t)__shfl_xor_sync(FULL_MASK, (uint32_t)(mine >> 32), with) << 32);
}

/* The part of a syndrome that 16 bits from bit `from` of a block on have in it. */
DEVICE uint64_t part_of_syndrome(const struct code &code, int from, uint32_t piece) {
    uint64_t sum = 0;
    for (int q = 0; q < 4; q++) sum ^= (uint64_t)code.sums[(from / 4 + q) * 16 + (piece >> 4 * q & 15)];
    return sum;
}

/* The XOR of the parts of a team, in all of its lanes; every lane of the warp calls it. */
DEVICE uint64_t xor_of_team(uint64_t part, int team) {
    for (int with = team / 2; with; with /= 2) part = xor_of_lanes(part, with);
    return part;
}

/* The syndrome of the n bits from bit `at` on, in all lanes of a team; every lane of the warp calls it. */
DEVICE uint64_t syndrome_of_bits(const struct code &code, const uint32_t *bits, int at, int n, int team) {
    uint64_t sum = 0;
    for (int from = (int)threadIdx.x % team * PIECE; from < n; from += team * PIECE) {
        uint32_t piece = piece_at(bits, at + from);
        if (n - from < PIECE) piece &= (1u << (n - from)) - 1;
        sum ^= part_of_syndrome(code, from, piece);
    }
    return xor_of_team(sum, team);
}

/* A block of a code, as a team of lanes sees it. */
struct code_block {
    int is_there;      /* 0: this team has none left */
    int slot, index;   /* which row of the thread block, which block of that row */
    int at, n;         /* its bits in the row */
    uint64_t syndrome;
    int team;          /* how many lanes it has */
    int is_first_lane;
};

/* Visit the blocks of the code in `num_slots` rows of `width` bits, rows `stride` words apart. Whole warps visit
 * together, some teams without a block. Rows of bits are there once all threads have met a barrier. */
template <class Visit>
DEVICE void for_code_blocks(const struct code &code, const uint32_t *bits, int stride, int num_slots, int width,
                            Visit visit) {
    int team = 1, per_row = blocks_in(code, width), num_items = num_slots * per_row;
    while (team < WARP && team * PIECE < code.length) team *= 2;
    for (int first = 0; first < num_items; first += (int)blockDim.x / team) {
        struct code_block block;
        int item = first + (int)threadIdx.x / team;
        block.is_there = item < num_items;
        block.slot = block.is_there ? item / per_row : 0;
        block.index = block.is_there ? item % per_row : 0;
        block.at = block.index * code.length;
        block.n = block.is_there ? least(code.length, width - block.at) : 0;
        block.syndrome = syndrome_of_bits(code, bits + block.slot * stride, block.at, block.n, team);
        block.team = team;
        block.is_first_lane = (int)threadIdx.x % team == 0;
        visit(block);
    }
}

/* Put `num` bits, 1 .. 63, into a bit string in shared memory that is 0 there; others may write to the same words. */
DEVICE void put_bits(uint32_t *words, int at, int num, uint64_t bits) {
    int shift = at % 32;
    words += at / 32;
    atomicOr(words, (uint32_t)(bits << shift)); /* ORs give the same word in any order */
    if (shift + num > 32) atomicOr(words + 1, (uint32_t)(bits >> (32 - shift)));
    if (shift + num > 64) atomicOr(words + 2, (uint32_t)(bits >> (64 - shift)));
}

/* Words of the syndromes of a row. */
DEVICE int words_of_syndromes(const struct code &code, int width) {
    return (blocks_in(code, width) * code.num_bits + 31) / 32;
}

/* Write the syndromes of `num_slots` rows in shared memory to rows of bytes that follow each other. `words` is shared
 * memory for words_of_syndromes of every row. All threads call it; bits are there once they have met a barrier. */
DEVICE void write_syndromes(const struct code &code, const uint32_t *bits, int stride, int num_slots, int width,
                            uint32_t *words, uint8_t *to) {
    int num_words = words_of_syndromes(code, width), num_bytes = (blocks_in(code, width) * code.num_bits + 7) / 8;
    for (int w = (int)threadIdx.x; w < num_slots * num_words; w += (int)blockDim.x) words[w] = 0;
    __syncthreads();
    for_code_blocks(code, bits, stride, num_slots, width, [&](const struct code_block &block) {
        if (block.is_there && block.is_first_lane)
            put_bits(words + block.slot * num_words, block.index * code.num_bits, code.num_bits, block.syndrome);
    });
    __syncthreads();
    for (int i = (int)threadIdx.x; i < num_slots * num_bytes; i += (int)blockDim.x) {
        int slot = i / num_bytes, j = i % num_bytes;
        to[i] = (uint8_t)(words[slot * num_words + j / 4] >> 8 * (j % 4));
    }
}

#endif
