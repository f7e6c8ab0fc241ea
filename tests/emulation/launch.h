/* Run a kernel over a grid; see emulated.h. One exported function per kernel: EMULATED(name). */

#include <csignal>

extern char __start_emulated_shared[] __attribute__((weak)), __stop_emulated_shared[] __attribute__((weak));

namespace emulation {

inline void (*entry)(void *);
inline void *entry_arguments;

static void run_fiber() {
    entry(entry_arguments);
    Fiber &fiber = me();
    if (!fiber.open.empty() || !fiber.groups.empty()) stop("ends with copies under way");
    if (!fiber.open_products.empty() || !fiber.product_groups.empty()) stop("ends with products under way");
    fiber.is_done = true;
    now->num_done++;
    now->num_steps++;
    now->num_idle = 0;
    if (now->num_at_barrier && now->num_at_barrier == now->num_threads - now->num_done) {
        now->num_at_barrier = 0;
        now->barrier_generation++;
    }
    swapcontext(&fiber.context, &now->scheduler);
}

static void poison(size_t dynamic_bytes) {
    if (__start_emulated_shared)
        std::memset(__start_emulated_shared, 0xFF, (size_t)(__stop_emulated_shared - __start_emulated_shared));
    std::memset(dynamic_shared, 0xFF, dynamic_bytes);
}

/* `order`: 0 threads ascending, 1 descending, 2 interleaved over the warps, each a step at a time; 3 warp by warp, each as
 * far as it comes. */
static int thread_at(int turn, int n, int order) {
    if (order == 1) return n - 1 - turn;
    if (order == 2) return (int)((turn * 37L + 11) % n);
    return turn;
}

static void run_thread(Block &block, int t) {
    if (block.fibers[(size_t)t].is_done) return;
    block.running = t;
    swapcontext(&block.scheduler, &block.fibers[(size_t)t].context);
}

/* Let a warp run until all of its threads wait for others. */
static void run_warp(Block &block, int first) {
    long before;
    do {
        before = block.num_steps;
        for (int lane = 0; lane < WARP_LANES; lane++) run_thread(block, first + lane);
    } while (block.num_steps != before);
}

static void run_block(Block &block, int order) {
    for (int t = 0; t < block.num_threads; t++) {
        Fiber &fiber = block.fibers[(size_t)t];
        fiber.is_done = fiber.has_unseen = fiber.may_multiply = false;
        uint32_t at = (uint32_t)t;
        fiber.index = {at % block.size.x, at / block.size.x % block.size.y, at / (block.size.x * block.size.y)};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    block.num_done = block.num_at_barrier = 0;
    block.num_idle = 0;
    if (order == 3) {
        while (block.num_done < block.num_threads)
            for (int first = 0; first < block.num_threads; first += WARP_LANES) run_warp(block, first);
        return;
    }
    while (block.num_done < block.num_threads)
        for (int turn = 0; turn < block.num_threads; turn++) run_thread(block, thread_at(turn, block.num_threads, order));
}

template <class... Arguments, size_t... index>
static void call(void (*kernel)(Arguments...), void **arguments, std::index_sequence<index...>) {
    kernel(*static_cast<std::remove_reference_t<Arguments> *>(arguments[index])...);
}

/* grid and size: three each. Returns 0, or 1 for a launch that no GPU accepts. */
template <class... Arguments>
static int launch(void (*kernel)(Arguments...), const uint32_t *grid, const uint32_t *size, int64_t shared_bytes,
                  int order, void **arguments) {
    struct Bound {
        void (*kernel)(Arguments...);
        void **arguments;
    } bound = {kernel, arguments};
    uint32_t num_threads = size[0] * size[1] * size[2];
    if (num_threads == 0 || num_threads > 1024 || num_threads % WARP_LANES || shared_bytes > 227 << 10) return 1;
    Block block{};
    block.num_threads = (int)num_threads;
    block.fibers.resize(num_threads);
    for (Fiber &fiber : block.fibers) fiber.stack.reset(new char[STACK_BYTES]);
    block.warps.resize(num_threads / WARP_LANES);
    block.grid = {grid[0], grid[1], grid[2]};
    block.size = {size[0], size[1], size[2]};
    now = &block;
    dynamic_shared = static_cast<char *>(std::aligned_alloc(128, (size_t)(shared_bytes / 128 + 1) * 128));
    entry_arguments = &bound;
    entry = [](void *given) {
        Bound *bound = static_cast<Bound *>(given);
        call(bound->kernel, bound->arguments, std::index_sequence_for<Arguments...>());
    };
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                block.index = {x, y, z};
                poison((size_t)shared_bytes);
                run_block(block, order);
            }
    std::free(dynamic_shared);
    now = nullptr;
    return 0;
}

}  // namespace emulation

#define EMULATED(name)                                                                                       \
    extern "C" int emulated_##name(const uint32_t *grid, const uint32_t *size, int64_t shared_bytes, int order, \
                                   void **arguments) {                                                       \
        return emulation::launch(name, grid, size, shared_bytes, order, arguments);                          \
    }
