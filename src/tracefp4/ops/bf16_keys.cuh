/* bf16 numbers as integers of 16 bits in the same order; both zeros are one. */

#ifndef TRACEFP4_BF16_KEYS_CUH
#define TRACEFP4_BF16_KEYS_CUH

#include "device.cuh"

DEVICE int key_of(uint32_t bits) {
    if ((bits & 0x7FFF) == 0) bits = 0;
    return (int)(bits & 0x8000 ? ~bits & 0xFFFF : bits | 0x8000);
}

/* The number with a key, as float32. */
DEVICE float number_of(int key) {
    return float_of((uint32_t)(key & 0x8000 ? key & 0x7FFF : ~key & 0xFFFF) << 16);
}

#endif
