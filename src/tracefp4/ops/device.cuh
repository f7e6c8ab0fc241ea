/* What kernels for NVIDIA GPUs are written in: CUDA C++ of C++17 without any CUDA header, plus the few instructions
 * below that the language has no name for. NVRTC compiles them (ops/nvrtc.py), from the same definitions of numbers
 * that the processor's kernels use (e2m1.h, scaling.h). Tests compile the very same files for the processor, where
 * tests/emulation/emulated.h stands in for this part.
 *
 * Fragments are those of mma.m16n8k16 in the PTX manual: with g = lane / 4 and j = lane % 4, A holds rows g and g + 8 at
 * columns 2j, 2j + 1 and 2j + 8, 2j + 9; B holds rows 2j, 2j + 1 and 2j + 8, 2j + 9 of column g; C holds rows g and
 * g + 8 at columns 2j and 2j + 1. Two 16-bit values share a register, the even index in the low half. */

#ifndef TRACEFP4_DEVICE_CUH
#define TRACEFP4_DEVICE_CUH

#include "e2m1.h"

#define KERNEL extern "C" __global__ void
enum { WARP = 32 };
#define FULL_MASK 0xFFFFFFFFu

/* The two bf16 of a word as floats. */
INLINE float low_bf16(uint32_t pair) { return float_of(pair << 16); }
INLINE float high_bf16(uint32_t pair) { return float_of(pair & 0xFFFF0000u); }

#ifndef TRACEFP4_EMULATED
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__
/* The shared memory whose size the launch gives. */
#define DYNAMIC_SHARED(type, name)                              \
    extern __shared__ __align__(128) unsigned char tracefp4_shared[]; \
    type *name = reinterpret_cast<type *>(tracefp4_shared)

/* Wait until the launches before this one have ended and their results can be read; then let the next one come. Every
 * kernel begins with it: from sm_90 on it was put on the multiprocessors while they were still running (ops/device.py). */
DEVICE void await_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* a * b of two fp16 each. */
DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* 1.0 in each half where the bf16 in a is above the one in b, otherwise 0.0; a + b of two bf16; the
 * larger and the smaller of two unsigned 16-bit integers. Single instructions from sm_90 on. */
#if __CUDA_ARCH__ >= 900
DEVICE uint32_t above_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("set.gt.bf16x2.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE uint32_t most_u16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE uint32_t least_u16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#else
DEVICE uint32_t above_bf16x2(uint32_t a, uint32_t b) {
    return (low_bf16(a) > low_bf16(b) ? 0x3F80u : 0) | (high_bf16(a) > high_bf16(b) ? 0x3F800000u : 0);
}
DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    return bf16_bits(low_bf16(a) + low_bf16(b)) | (uint32_t)bf16_bits(high_bf16(a) + high_bf16(b)) << 16;
}
DEVICE uint32_t most_u16x2(uint32_t a, uint32_t b) {
    uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
}
DEVICE uint32_t least_u16x2(uint32_t a, uint32_t b) { return ~most_u16x2(~a, ~b); }
#endif

/* a * b + c of two bf16 each, rounded once; subnormals are kept. */
DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

/* a * b of two bf16 each; subnormals are kept. */
DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }

/* Two E4M3 bytes as two fp16; exact. */
DEVICE uint32_t f16x2_of_e4m3x2(uint32_t bytes) {
    uint32_t r;
    uint16_t two = (uint16_t)bytes;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
    return r;
}

/* The same of the two bytes in the upper half of a word, which costs no shift. */
DEVICE uint32_t f16x2_of_upper_e4m3x2(uint32_t word) {
    uint32_t r;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(r) : "r"(word));
    return r;
}

/* The bits of a where the mask has ones and those of b elsewhere, in one instruction whatever is done with them. */
DEVICE uint32_t chosen_bits(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
}

/* The low or the high half of a word, twice: a choice that the instructions for two fp16 make by themselves. */
DEVICE uint32_t twice_low(uint32_t two) {
    uint32_t r;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(r) : "r"(two));
    return r;
}
DEVICE uint32_t twice_high(uint32_t two) {
    uint32_t r;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(r) : "r"(two));
    return r;
}

/* Two floats rounded to fp16, `low` in the low half; NaN and overflow as IEEE has them. */
DEVICE uint32_t f16x2_of(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* Two floats rounded to bf16, `low` in the low half; NaN becomes 0x7FFF. */
DEVICE uint32_t bf16x2_of(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* c += A B with A 16 x 16 and B 16 x 8 in fp16, c in float32. */
DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same with A and B in bf16. */
DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* An 8 x 8 matrix of 16-bit values over the warp, transposed: lane l holds row l / 4, columns 2 (l % 4) and + 1. */
DEVICE uint32_t transpose_8x8(uint32_t x) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

/* 2^x, about 2 units in the last place; 0 for -infinity. */
DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* A place in shared memory as instructions name it: sums with constants cost nothing there. */
typedef uint32_t shared_place;
DEVICE shared_place place_in_shared(const void *shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

/* Copy 16 bytes from global to shared memory without waiting; zeros if `is_there` is 0. Both aligned to 16. */
DEVICE void copy_async(shared_place to, const void *global, int is_there) {
    uint32_t bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
DEVICE void copy_async(void *shared, const void *global, int is_there) {
    copy_async(place_in_shared(shared), global, is_there);
}

/* End a group of copies of this thread; wait until at most `left` of its groups are under way. A barrier makes what
 * arrived visible to the other threads. */
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

/* 1 / x, within one unit in the last place. */
DEVICE float reciprocal_fast(float x) {
    float r;
    asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* 16 bytes that are read once: they are the first to leave the caches. */
DEVICE uint4 load_once(const uint4 *at) { return __ldcs(at); }

/* End the kernel with an error: an operand breaks what its op promises. */
DEVICE void stop_here() { asm volatile("trap;"); }

/* Four 8 x 8 matrices of 16-bit values from shared memory: lane l brings the address of row l % 8 of matrix l / 8, 16
 * bytes and aligned, and takes from matrix i into r[i] row l / 4, columns 2 (l % 4) and + 1; or so of its transpose. */
DEVICE void load_matrices(uint32_t (&r)[4], const void *row) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void *row) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
#endif

#endif
