/* The part of CUDA that our kernels use, on one processor core: a block's threads are fibers, each with a stack of its
 * own, that run until they meet a barrier or an instruction of the whole warp. So a kernel file is compiled by a C++
 * compiler as it is, and tested against its definition without a GPU.
 *
 * Faithful where it matters: shared memory starts as NaN patterns in every block; asynchronous copies arrive when they
 * are awaited and not before; threads run in an order that the caller chooses, and results that depend on it have a
 * race; a thread that waits for one that never comes ends the process and says so; addresses are real, so a sanitizer
 * sees what lies outside. Not emulated: time, caches, the order in which a matrix unit adds (here: k ascending in
 * float32), blocks that run at once (here: one after the other). */

#ifndef TRACEFP4_EMULATED_H
#define TRACEFP4_EMULATED_H

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
#define DEVICE static inline
#define SHARED static __attribute__((section("emulated_shared")))
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(emulation::dynamic_shared)

struct uint2 { uint32_t x, y; };
struct uint3 { uint32_t x, y, z; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

enum { WARP_LANES = 32, STACK_BYTES = 256 << 10, WORDS = 12 };

struct Copy {
    void *to;
    const void *from;
    int is_there;
};

/* A product under way: c += A B, with the operands that it began with. */
struct Product {
    float *c;
    const uint32_t *a;
    uint64_t b;
    int tiles;
    uint32_t a_then[4];
    std::vector<uint16_t> b_then;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    uint3 index;
    bool is_done;
    std::vector<Copy> open;                /* copies since the last group ended */
    std::vector<std::vector<Copy>> groups; /* oldest first */
    std::vector<Product> open_products;
    std::vector<std::vector<Product>> product_groups;
    bool has_unseen, may_multiply;         /* copies arrived that products cannot read yet; operands are fenced */
};

struct Warp {
    int num_arrived;
    uint32_t generation;
    uint32_t slot[2][WARP_LANES][WORDS];   /* a lane cannot be two generations ahead of another */
};

struct Block {
    ucontext_t scheduler;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    int num_threads, num_done, running;
    int num_at_barrier;
    uint32_t barrier_generation;
    bool reads_too_early;                  /* a thread came to a barrier with copies that products cannot read */
    long num_idle;                         /* turns in a row in which no thread went on */
    long num_steps;                        /* times that a thread went on */
    uint3 grid, size, index;
};

inline Block *now;
inline char *dynamic_shared;

[[noreturn]] inline void stop(const char *why) {
    std::fprintf(stderr, "emulation: block (%u, %u, %u), thread %d %s\n", now->index.x, now->index.y, now->index.z,
                 now->running, why);
    std::abort();
}

inline Fiber &me() { return now->fibers[(size_t)now->running]; }
inline int lane() { return now->running % WARP_LANES; }

/* Let the others run until `is_over` holds. */
template <class Condition> inline void wait_until(Condition is_over) {
    while (!is_over()) {
        if (++now->num_idle > 2L * now->num_threads) stop("waits for a thread that never comes");
        swapcontext(&me().context, &now->scheduler);
    }
    now->num_steps++;
    now->num_idle = 0;
}

inline void barrier() {
    uint32_t generation = now->barrier_generation;
    now->reads_too_early |= me().has_unseen;
    if (++now->num_at_barrier == now->num_threads - now->num_done) {
        now->num_at_barrier = 0;
        now->barrier_generation++;
    }
    wait_until([=] { return now->barrier_generation != generation; });
}

/* Show `n` words to the warp, and return everybody's once all have shown theirs. */
inline uint32_t (*meet(const uint32_t *words, int n, uint32_t mask))[WORDS] {
    if (mask != 0xFFFFFFFFu) stop("asks a part of its warp, which is not emulated");
    Warp *warp = &now->warps[(size_t)(now->running / WARP_LANES)];
    uint32_t generation = warp->generation, side = generation & 1;
    std::memcpy(warp->slot[side][lane()], words, (size_t)n * sizeof(uint32_t));
    if (++warp->num_arrived == WARP_LANES) {
        warp->num_arrived = 0;
        warp->generation++;
    }
    wait_until([=] { return warp->generation != generation; });
    return warp->slot[side];
}

template <class T> inline uint32_t word_of(T value) {
    static_assert(sizeof(T) == 4, "lanes exchange 32 bits");
    uint32_t word;
    std::memcpy(&word, &value, 4);
    return word;
}

template <class T> inline T value_of(uint32_t word) {
    T value;
    std::memcpy(&value, &word, 4);
    return value;
}

template <class T> inline T from_lane(T value, int source, uint32_t mask) {
    uint32_t word = word_of(value);
    return value_of<T>(meet(&word, 1, mask)[source & 31][0]);
}

inline float float_of_half(uint32_t bits) {
    uint16_t half = (uint16_t)bits;
    _Float16 value;
    std::memcpy(&value, &half, 2);
    return (float)value;
}

inline uint32_t half_of_float(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline float float_of_bf16(uint32_t bits) { return value_of<float>(bits << 16); }

inline uint32_t bf16_of_float(float value) {
    if (value != value) return 0x7FFF;
    uint32_t bits = word_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

/* a + b rounded once: sums of two doubles and of what they lose, cut to float32 and marked in the last bit where they are
 * not exact. */
inline uint32_t bf16_of_sum(double a, double b) {
    double sum = a + b, of_b = sum - a, lost = (a - (sum - of_b)) + (b - of_b);
    float cut = (float)sum;
    if (!(std::abs(sum) < HUGE_VAL)) return bf16_of_float(cut);
    if (std::abs((double)cut) > std::abs(sum)) cut = std::nextafter(cut, 0.0f);
    if ((double)cut == sum && lost != 0.0 && (lost < 0.0) == (sum > 0.0)) cut = std::nextafter(cut, 0.0f);
    return bf16_of_float((double)cut != sum || lost != 0.0 ? value_of<float>(word_of(cut) | 1) : cut);
}

template <float (*widen)(uint32_t)> inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    uint32_t(*all)[WORDS] = meet(mine, 6, 0xFFFFFFFFu);
    int g = lane() / 4, j = lane() % 4;
    for (int i = 0; i < 4; i++) {
        int row = g + 8 * (i / 2), column = 2 * j + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) {
            uint32_t pair_a = all[(row % 8) * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            uint32_t pair_b = all[column * 4 + k % 8 / 2][4 + k / 8];
            sum += widen(pair_a >> 16 * (k % 2) & 0xFFFF) * widen(pair_b >> 16 * (k % 2) & 0xFFFF);
        }
        c[i] += sum;
    }
}

/* ldmatrix: lane 8 i + n brings row n of matrix i; `entry` picks entry (g, j) of the matrix or of its transpose. */
template <class Entry> inline void matrices(uint32_t (&r)[4], const void *row, Entry entry) {
    uint64_t address = reinterpret_cast<uintptr_t>(row);
    if (address % 16) stop("reads a matrix row that is not aligned");
    uint32_t words[2] = {(uint32_t)address, (uint32_t)(address >> 32)};
    uint32_t(*all)[WORDS] = meet(words, 2, 0xFFFFFFFFu);
    int g = lane() / 4, j = 2 * (lane() % 4);
    for (int i = 0; i < 4; i++) {
        const uint16_t *rows[8];
        for (int n = 0; n < 8; n++)
            rows[n] = reinterpret_cast<const uint16_t *>(all[8 * i + n][0] | (uint64_t)all[8 * i + n][1] << 32);
        r[i] = entry(rows, g, j) | (uint32_t)entry(rows, g, j + 1) << 16;
    }
}

inline void copy_now(const Copy &copy) {
    if (copy.is_there)
        std::memcpy(copy.to, copy.from, 16);
    else
        std::memset(copy.to, 0, 16);
}

inline void await_groups(size_t left) {
    std::vector<std::vector<Copy>> &groups = me().groups;
    while (groups.size() > left) {
        for (const Copy &copy : groups.front()) copy_now(copy);
        me().has_unseen |= !groups.front().empty();
        groups.erase(groups.begin());
    }
}

}  // namespace emulation

#define threadIdx (emulation::me().index)
#define blockIdx (emulation::now->index)
#define blockDim (emulation::now->size)
#define gridDim (emulation::now->grid)

static inline void __syncthreads() { emulation::barrier(); }
static inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu) { emulation::meet(&mask, 1, mask); }
template <class T> static inline T __shfl_xor_sync(uint32_t mask, T value, int with) {
    return emulation::from_lane(value, emulation::lane() ^ with, mask);
}
template <class T> static inline T __shfl_sync(uint32_t mask, T value, int source) {
    return emulation::from_lane(value, source, mask);
}
template <class T> static inline T __shfl_down_sync(uint32_t mask, T value, int by) {
    return emulation::from_lane(value, emulation::lane() + by < 32 ? emulation::lane() + by : emulation::lane(), mask);
}
template <class T> static inline T __shfl_up_sync(uint32_t mask, T value, int by) {
    return emulation::from_lane(value, emulation::lane() >= by ? emulation::lane() - by : emulation::lane(), mask);
}
static inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    uint32_t mine = predicate != 0, ballot = 0;
    uint32_t(*all)[emulation::WORDS] = emulation::meet(&mine, 1, mask);
    for (int i = 0; i < 32; i++) ballot |= all[i][0] << i;
    return ballot;
}
static inline uint32_t __match_any_sync(uint32_t mask, int value) {
    uint32_t mine = (uint32_t)value, same = 0;
    auto all = emulation::meet(&mine, 1, mask);
    for (int i = 0; i < 32; i++) same |= (uint32_t)(all[i][0] == mine) << i;
    return same & mask;
}
static inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }
template <class T> static inline T __ldg(const T *at) { return *at; }
template <class T> static inline T __ldcs(const T *at) { return *at; }
template <class T> static inline void __stcs(T *at, T value) { *at = value; }
template <class T> static inline T atomicAdd(T *at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}
template <class T> static inline T atomicMax(T *at, T value) {
    T old = *at;
    *at = old > value ? old : value;
    return old;
}
template <class T> static inline T atomicOr(T *at, T value) {
    T old = *at;
    *at = old | value;
    return old;
}
template <class T, class Join> static inline T reduced(uint32_t mask, T value, Join join) {
    auto all = emulation::meet((uint32_t *)&value, 1, mask);
    T found = (T)all[0][0];
    for (int i = 1; i < 32; i++) found = join(found, (T)all[i][0]);
    return found;
}
#define REDUCED(name, joined) \
    static inline int name(uint32_t mask, int value) { return reduced(mask, value, [](int a, int b) { return joined; }); }
REDUCED(__reduce_min_sync, a < b ? a : b)
REDUCED(__reduce_max_sync, a > b ? a : b)
REDUCED(__reduce_add_sync, a + b)
static inline void __threadfence() {}
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((uint32_t)x) : 32; }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t pick = selector >> 4 * i & 15;
        uint32_t byte = (uint32_t)(bytes >> 8 * (pick & 7) & 0xFF);
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << 8 * i;
    }
    return result;
}
static inline float __uint_as_float(uint32_t x) { return emulation::value_of<float>(x); }
static inline uint32_t __float_as_uint(float x) { return emulation::word_of(x); }
static inline float __fdividef(float a, float b) { return a / b; }
using std::fmaxf;
using std::fminf;
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }

/* What device.cuh declares. */
/* Launches run one after the other here. */
DEVICE void await_earlier() {}

DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    using namespace emulation;
    uint32_t low = half_of_float(float_of_half(a) * float_of_half(b));
    return low | half_of_float(float_of_half(a >> 16) * float_of_half(b >> 16)) << 16;
}
DEVICE uint32_t above_bf16x2(uint32_t a, uint32_t b) {
    using emulation::float_of_bf16;
    uint32_t low = float_of_bf16(a & 0xFFFF) > float_of_bf16(b & 0xFFFF) ? 0x3F80 : 0;
    return low | (float_of_bf16(a >> 16) > float_of_bf16(b >> 16) ? 0x3F800000 : 0);
}
DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    using namespace emulation;
    uint32_t low = bf16_of_float(float_of_bf16(a & 0xFFFF) + float_of_bf16(b & 0xFFFF));
    return low | bf16_of_float(float_of_bf16(a >> 16) + float_of_bf16(b >> 16)) << 16;
}
DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    using namespace emulation;
    uint32_t low = bf16_of_float(float_of_bf16(a & 0xFFFF) * float_of_bf16(b & 0xFFFF));
    return low | bf16_of_float(float_of_bf16(a >> 16) * float_of_bf16(b >> 16)) << 16;
}
DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t both = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        float x = emulation::float_of_bf16(a >> shift & 0xFFFF), y = emulation::float_of_bf16(b >> shift & 0xFFFF);
        both |= emulation::bf16_of_sum((double)x * y, emulation::float_of_bf16(c >> shift & 0xFFFF)) << shift;
    }
    return both;
}
DEVICE uint32_t least_u16x2(uint32_t a, uint32_t b) {
    uint32_t low = (a & 0xFFFF) < (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return low | ((a >> 16) < (b >> 16) ? a >> 16 : b >> 16) << 16;
}
DEVICE uint32_t most_u16x2(uint32_t a, uint32_t b) {
    uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
}
DEVICE float half_of_e4m3(uint32_t byte) {
    uint32_t exponent = byte >> 3 & 15, fraction = byte & 7;
    float magnitude = exponent ? std::ldexp(1.0f + (float)fraction / 8.0f, (int)exponent - 7)
                               : std::ldexp((float)fraction, -9);
    if ((byte & 0x7F) == 0x7F) magnitude = std::nanf("");
    return byte & 0x80 ? -magnitude : magnitude;
}
DEVICE uint32_t f16x2_of_e4m3x2(uint32_t bytes) {
    uint32_t high = emulation::half_of_float(half_of_e4m3(bytes >> 8 & 0xFF));
    return emulation::half_of_float(half_of_e4m3(bytes & 0xFF)) | high << 16;
}
DEVICE uint32_t f16x2_of_upper_e4m3x2(uint32_t word) { return f16x2_of_e4m3x2(word >> 16); }
DEVICE uint32_t twice_low(uint32_t two) { return (two & 0xFFFF) | two << 16; }
DEVICE uint32_t twice_high(uint32_t two) { return (two & 0xFFFF0000u) | two >> 16; }
DEVICE uint32_t chosen_bits(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
DEVICE uint32_t f16x2_of(float low, float high) {
    return emulation::half_of_float(low) | emulation::half_of_float(high) << 16;
}
DEVICE uint32_t bf16x2_of(float low, float high) {
    return emulation::bf16_of_float(low) | emulation::bf16_of_float(high) << 16;
}
DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulation::mma<emulation::float_of_half>(c, a, b0, b1);
}
DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulation::mma<emulation::float_of_bf16>(c, a, b0, b1);
}
DEVICE uint32_t transpose_8x8(uint32_t x) {
    uint32_t(*all)[emulation::WORDS] = emulation::meet(&x, 1, 0xFFFFFFFFu);
    int row = emulation::lane() / 4, column = 2 * (emulation::lane() % 4), shift = 16 * (row % 2);
    uint32_t low = all[column * 4 + row / 2][0] >> shift & 0xFFFF;
    return low | (all[(column + 1) * 4 + row / 2][0] >> shift & 0xFFFF) << 16;
}
DEVICE float exp2_fast(float x) { return std::exp2(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
DEVICE float reciprocal_fast(float x) { return 1.0f / x; }
typedef uint8_t *shared_place;
DEVICE shared_place place_in_shared(uint8_t *shared) { return shared; }
DEVICE void copy_async(void *shared, const void *global, int is_there) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
        emulation::stop("copies 16 bytes that are not aligned");
    emulation::me().open.push_back({shared, global, is_there});
}
DEVICE void commit_copies() {
    emulation::me().groups.push_back(std::move(emulation::me().open));
    emulation::me().open.clear();
}
template <int left> DEVICE void await_copies() { emulation::await_groups(left); }
DEVICE uint4 load_once(const uint4 *at) { return *at; }
DEVICE void stop_here() { emulation::stop("breaks what its op promises"); }
DEVICE void load_matrices(uint32_t (&r)[4], const void *row) {
    emulation::matrices(r, row, [](const uint16_t *const *rows, int g, int j) { return rows[g][j]; });
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void *row) {
    emulation::matrices(r, row, [](const uint16_t *const *rows, int g, int j) { return rows[j][g]; });
}

#include "barriers.h"
#include "warpgroups.h"

#endif
