/* A row of bf16 in the registers of a thread block, for kernels that compute it and may quantize it: thread t holds eights
 * t, t + threads, ... of its elements, and neighbouring lanes share a block of the scheme. Same bytes as quantize.
 *
 * Defines: those of blocks.cuh; OUTER_OF_ROW, 1 where each row finds its own outer scale; PARTS, eights of a thread. */

#ifndef TRACEFP4_BF16_ROWS_CUH
#define TRACEFP4_BF16_ROWS_CUH

#include "blocks.cuh"

enum { TEAM = BLOCK / 8 /* lanes that share a block */ };

struct eight {
    uint32_t word[4];
};

struct row {
    struct eight part[PARTS];
};

DEVICE int num_eights_of(int width) { return width / 8; }

/* Where part p of this thread lies in its row. */
DEVICE int eight_of(int p) { return (int)threadIdx.x + p * (int)blockDim.x; }

DEVICE struct eight eight_of_words(uint4 four) {
    struct eight eight = {{four.x, four.y, four.z, four.w}};
    return eight;
}

DEVICE struct eight load_eight(const void *x, int64_t at) {
    return eight_of_words(load_once(static_cast<const uint4 *>(x) + at));
}

/* Eight elements of something that all rows read: they should stay in the caches. */
DEVICE struct eight load_shared_eight(const void *x, int64_t at) {
    return eight_of_words(static_cast<const uint4 *>(x)[at]);
}

DEVICE void store_eight(const struct eight &eight, void *x, int64_t at) {
    static_cast<uint4 *>(x)[at] = make_uint4(eight.word[0], eight.word[1], eight.word[2], eight.word[3]);
}

/* The larger of this lane's number and that of a lane of its team. */
DEVICE int32_t most_of_two(int32_t mine, int with) { return most(mine, __shfl_xor_sync(FULL_MASK, mine, with)); }

/* Quantize the row of this thread block. `stored` holds its values, written by the threads that hold them. */
DEVICE void quantize_row(const struct row &row, int width, const void *stored, void *outer, uint8_t *block_scales,
                         uint8_t *packed) {
    int num_eights = num_eights_of(width);
    int64_t first = (int64_t)blockIdx.x * num_eights;
    int32_t amax_bits[PARTS], largest = 0;
    for (int p = 0; p < PARTS; p++) {
        int32_t of_sixteen = most_of_two(eight_of(p) < num_eights ? amax_of(row.part[p].word, 8) : 0, 1);
        largest = most(largest, of_sixteen < INF_BITS ? of_sixteen : 0);
        amax_bits[p] = TEAM == 4 ? most_of_two(of_sixteen, 2) : of_sixteen;
    }
    struct outer scale;
    if (OUTER_OF_ROW) {
        float amax = float_of((uint32_t)most_of_block(largest));
        if (threadIdx.x == 0) write_outer(&RULES, amax, outer, blockIdx.x);
        scale = outer_of_amax(amax);
    } else {
        scale = read_outer(&RULES, outer, 0);
    }
    if (RULES.candidates != SIX) __syncwarp(); /* candidates are compared on what the team has stored */
    for (int p = 0; p < PARTS; p++) {
        int64_t at = first + eight_of(p);
        if (eight_of(p) >= num_eights) continue;
        struct grid grid = grid_of(amax_bits[p], scale_byte_of(amax_bits[p], stored, at / TEAM, scale), scale);
        reinterpret_cast<uint32_t *>(packed)[at] = rounded_to(grid, row.part[p].word);
        if (at % TEAM == 0) block_scales[at / TEAM] = (uint8_t)grid.byte;
    }
}

#endif
