/* Asynchronous matrix products of four warps ("warpgroups", wgmma), which sm_90 alone has: A in registers, B in shared memory.
 * They run at the full rate of Hopper's matrix units, of which mma.sync reaches about half. */

#ifndef TRACEFP4_WARPGROUPS_CUH
#define TRACEFP4_WARPGROUPS_CUH

#include "device.cuh"

/* Rows of 64 bf16 in shared memory as the B operand of an asynchronous product (Hopper's matrix descriptor): every eight rows
 * are 1024 bytes that begin at a multiple of 1024, and 16-byte piece p of row r lies where piece p ^ (r % 8) would. Steps of
 * 16 columns are 32 bytes apart, that is 2 in the operand. */
INLINE uint64_t rows_of_64(uint32_t address) {
    return (uint64_t)(address >> 4 & 0x3FFF) | 1ull << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

#ifndef TRACEFP4_EMULATED
/* Where something lies in shared memory. */
DEVICE uint32_t shared_address(const void *shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

/* Store four 8 x 8 matrices of 16-bit values, held as load_matrices gives them, transposed: lane l brings the address of row
 * l % 8 of matrix l / 8, 16 bytes and aligned. */
DEVICE void store_matrices_transposed(void *row, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    stop_here();
#endif
}

/* Asynchronous products of four warps, on sm_90 alone: c += A B, where each warp has 16 rows of A in registers, as mma_bf16
 * takes them, and B is 16 columns of rows_of_64, eight rows for each four sums. Neither a and c nor B may be touched before
 * the group of products was awaited. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SUMS_OF_ONE(m) "+f"(c[m][0]), "+f"(c[m][1]), "+f"(c[m][2]), "+f"(c[m][3])
#define SUMS_OF_FOUR(m) SUMS_OF_ONE(m), SUMS_OF_ONE(m + 1), SUMS_OF_ONE(m + 2), SUMS_OF_ONE(m + 3)
DEVICE void multiply_async(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
                 : SUMS_OF_FOUR(0), SUMS_OF_FOUR(4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}
DEVICE void multiply_async(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
                 : SUMS_OF_FOUR(0), SUMS_OF_FOUR(4), SUMS_OF_FOUR(8), SUMS_OF_FOUR(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* What the thread wrote to registers is there for the products that follow; what it copied to shared memory is, once a
 * barrier has followed too. */
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* End a group of products; wait until at most `left` groups are under way. */
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left> DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory"); }

/* Of the registers that the launch gave each thread, these four warps keep so many; or take so many, once others are left. */
template <int count> DEVICE void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
#else
template <int count> DEVICE void keep_registers() {}
template <int count> DEVICE void take_registers() {}
template <int tiles> DEVICE void multiply_async(float (&)[tiles][4], const uint32_t (&)[4], uint64_t) { stop_here(); }
DEVICE void begin_products() {}
DEVICE void show_copies() {}
DEVICE void commit_products() {}
template <int left> DEVICE void await_products() {}
#endif

/* Sums are not read earlier than here. */
DEVICE void settle(float &sum) { asm volatile("" : "+f"(sum)::"memory"); }
#endif

#endif
