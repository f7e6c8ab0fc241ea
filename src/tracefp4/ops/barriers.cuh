/* Barriers in shared memory, on which some threads of a block wait until others have arrived: a block's warps can run apart, by
 * as much as there are stages between them. Phases are numbered from 0, and a barrier knows the last digit of its own. */

#ifndef TRACEFP4_BARRIERS_CUH
#define TRACEFP4_BARRIERS_CUH

#include "device.cuh"

#ifndef TRACEFP4_EMULATED
/* A phase ends when `count` threads have arrived; one thread begins a barrier, before a barrier of the whole block. */
DEVICE void begin_barrier(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(barrier)), "r"(count)
                 : "memory");
}

/* What this thread wrote before is seen by those that await the phase. */
DEVICE void arrive(uint64_t *barrier) {
    uint64_t state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
                 : "=l"(state)
                 : "r"((uint32_t)__cvta_generic_to_shared(barrier))
                 : "memory");
}

#if __CUDA_ARCH__ >= 900
#define WAIT_OF_BARRIER "try_wait" /* which sleeps for a while */
#else
#define WAIT_OF_BARRIER "test_wait"
#endif

/* Wait for the end of the phase with this last digit; that of the phase before the first has ended. */
DEVICE void await_phase(uint64_t *barrier, uint32_t digit) {
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier." WAIT_OF_BARRIER ".parity.shared.b64 p, [%0], %1;\n"
        "@!p bra again;}" ::"r"((uint32_t)__cvta_generic_to_shared(barrier)),
        "r"(digit)
        : "memory");
}
#endif

#endif
