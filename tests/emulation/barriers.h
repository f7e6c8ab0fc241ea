/* Barriers in shared memory, as ops/barriers.cuh declares them: the digit of the running phase above, who is missing in the
 * low half, how many a phase takes between them. */

#ifndef TRACEFP4_EMULATED_BARRIERS_H
#define TRACEFP4_EMULATED_BARRIERS_H

DEVICE void begin_barrier(uint64_t *barrier, uint32_t count) { *barrier = (uint64_t)count << 16 | count; }
DEVICE void arrive(uint64_t *barrier) {
    if ((*barrier & 0xFFFF) == 0) emulation::stop("arrives at a barrier that never began");
    emulation::now->reads_too_early |= emulation::me().has_unseen;
    if ((--*barrier & 0xFFFF) == 0) *barrier = (*barrier ^ 1ull << 32) | (*barrier >> 16 & 0xFFFF);
}
DEVICE void await_phase(uint64_t *barrier, uint32_t digit) {
    emulation::wait_until([=] { return (*barrier >> 32 & 1) != digit; });
}
template <int count> DEVICE void keep_registers() {}
template <int count> DEVICE void take_registers() {}

#endif
