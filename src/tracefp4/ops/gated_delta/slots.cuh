/* Which state belongs to a sequence. */

#ifndef TRACEFP4_SLOTS_CUH
#define TRACEFP4_SLOTS_CUH

#include "device.cuh"

/* The slot of a sequence; negative for one without a state. One behind the last ends the kernel with an error. */
DEVICE int64_t state_slot(const int64_t *slots, int seq, int num_slots) {
    int64_t slot = slots[seq];
    if (slot >= num_slots) stop_here();
    return slot;
}

#endif
