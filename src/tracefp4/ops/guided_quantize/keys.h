/* What a search for flips sorts: candidates of a block of a code, nearest first; search.py is the definition. */

#ifndef TRACEFP4_KEYS_H
#define TRACEFP4_KEYS_H

#include "../e2m1.h"

enum {
    MAX_LENGTH = 512,    /* bits of a block */
    MAX_CANDIDATES = 64,
    MAX_FLIPS = 10,
    INDEX_BITS = 9,      /* a key holds a distance and below it an index in the block */
    NO_CANDIDATE = 0x7FFFFFFF
};

/* 8 bits that depend on all bits of a column. */
INLINE uint32_t hash(uint64_t column) { return (uint32_t)(column * 0x9E3779B97F4A7C15u >> 56); }

#endif
