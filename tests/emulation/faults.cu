/* Kernels with the faults that the emulation must show, and one without any. */

#include "barriers.cuh"
#include "device.cuh"

/* out[i] = in[i + 1] through shared memory. */
KERNEL shift(const int *in, int *out, int with_barrier) {
    SHARED int all[64];
    int t = (int)threadIdx.x;
    all[t] = in[t];
    if (with_barrier) __syncthreads();
    out[t] = all[(t + 1) % 64];
}

/* out[i] = in[i + 32] through shared memory, which a warp may write again two exchanges after it read. */
KERNEL overtaken(const int *in, int *out, int with_barrier) {
    SHARED int all[64];
    int t = (int)threadIdx.x;
    all[t] = in[t];
    __syncthreads();
    int found = all[(t + 32) % 64];
    found = __shfl_xor_sync(FULL_MASK, __shfl_xor_sync(FULL_MASK, found, 1), 1);
    if (with_barrier) __syncthreads();
    all[t] = -7;
    out[t] = found;
}

/* Half of the threads wait at a barrier that the others never reach. */
KERNEL lonely_lanes(int *out) {
    if (threadIdx.x % 2) return;
    out[threadIdx.x] = __shfl_xor_sync(FULL_MASK, 1, 1);
}

/* Copies 16 bytes per thread into shared memory and out again. */
KERNEL copied(const uint4 *in, uint4 *out, int awaits) {
    DYNAMIC_SHARED(uint4, all);
    copy_async(all + threadIdx.x, in + threadIdx.x, 1);
    commit_copies();
    if (awaits) await_copies<0>();
    __syncthreads();
    out[threadIdx.x] = all[threadIdx.x ^ 1];
    if (!awaits) await_copies<0>();
}

/* c = A B of one warp in fp16: A [16, 16], B [16, 8], both row by row. */
KERNEL product(const uint16_t *a, const uint16_t *b, float *c) {
    int g = (int)threadIdx.x / 4, j = (int)threadIdx.x % 4;
    uint32_t of_a[4], of_b[2];
    for (int i = 0; i < 4; i++) {
        int row = g + 8 * (i % 2), column = 2 * j + 8 * (i / 2);
        of_a[i] = a[row * 16 + column] | (uint32_t)a[row * 16 + column + 1] << 16;
    }
    for (int i = 0; i < 2; i++) of_b[i] = b[(2 * j + 8 * i) * 8 + g] | (uint32_t)b[(2 * j + 1 + 8 * i) * 8 + g] << 16;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_f16(sum, of_a, of_b[0], of_b[1]);
    for (int i = 0; i < 4; i++) c[(g + 8 * (i / 2)) * 8 + 2 * j + i % 2] = sum[i];
}

/* What the conversions give. */
KERNEL converted(const uint32_t *words, uint32_t *out) {
    uint32_t word = words[threadIdx.x];
    out[4 * threadIdx.x] = f16x2_of_e4m3x2(word & 0xFFFF);
    out[4 * threadIdx.x + 1] = transpose_8x8(word);
    out[4 * threadIdx.x + 2] = bf16x2_of(float_of(word), 1.0f);
    out[4 * threadIdx.x + 3] = f16x2_of(float_of(word), -2.0f);
}

/* Four matrices of 8 x 8 from shared memory, as they lie and transposed. */
KERNEL matrices(const uint4 *in, uint32_t *out) {
    SHARED __align__(16) uint4 all[32];
    int t = (int)threadIdx.x;
    all[t] = in[t];
    __syncwarp();
    uint32_t plain[4], transposed[4];
    load_matrices(plain, all + t);
    load_matrices_transposed(transposed, all + t);
    for (int i = 0; i < 4; i++) {
        out[i * 32 + t] = plain[i];
        out[128 + i * 32 + t] = transposed[i];
    }
}

KERNEL refused(int *out, int limit) {
    if (out[threadIdx.x] >= limit) stop_here();
}

/* The smallest number of each warp, and all bits of the block in one word. */
KERNEL combined(const int *in, int *out, uint32_t *bits) {
    int t = (int)threadIdx.x;
    out[t] = __reduce_min_sync(FULL_MASK, in[t]);
    atomicOr(bits, (uint32_t)in[t]);
}

/* The first warp hands numbers to the second, one after the other, through one place. */
KERNEL handed(const int *in, int *out, int count, int awaits) {
    SHARED uint64_t full, empty;
    SHARED int place[WARP];
    int lane = (int)threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        begin_barrier(&full, WARP);
        begin_barrier(&empty, WARP);
    }
    __syncthreads();
    for (int i = 0; i < count; i++)
        if ((int)threadIdx.x < WARP) {
            if (awaits & 1) await_phase(&empty, (i & 1) ^ 1);
            place[lane] = in[i * WARP + lane];
            arrive(&full);
        } else {
            if (awaits & 2) await_phase(&full, i & 1);
            out[i * WARP + lane] = place[lane ^ 1];
            arrive(&empty);
        }
}
