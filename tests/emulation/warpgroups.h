/* Asynchronous products of four warps, as ops/warpgroups.cuh declares them. They are computed when they are awaited, and so
 * late that a sum that is read before shows; operands are noted when a product begins, and one that has changed until it is
 * awaited makes its sums NaN. Copies that arrived and were not shown before a barrier are nothing that a product may read. */

#ifndef TRACEFP4_EMULATED_WARPGROUPS_H
#define TRACEFP4_EMULATED_WARPGROUPS_H

namespace emulation {

enum { WARPGROUP = 128, FIRST_ADDRESS = 128 /* of dynamic shared memory */ };

/* Row r's 16 columns of the operand that a descriptor names, 16 bytes at a time. */
inline void read_row(uint64_t descriptor, int r, uint16_t *columns) {
    if (descriptor >> 62 != 1) stop("names an operand that is not swizzled by 128 bytes");
    uint32_t start = (uint32_t)(descriptor & 0x3FFF) << 4, stride = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
    for (int piece = 0; piece < 2; piece++) {
        uint32_t address = start + (uint32_t)(r / 8) * stride + (uint32_t)(r % 8) * 128 + (uint32_t)piece * 16;
        address ^= (address >> 7 & 7) << 4;
        std::memcpy(columns + 8 * piece, dynamic_shared + (address - FIRST_ADDRESS), 16);
    }
}

inline std::vector<uint16_t> read_rows(uint64_t descriptor, int num_rows) {
    std::vector<uint16_t> rows((size_t)num_rows * 16);
    for (int r = 0; r < num_rows; r++) read_row(descriptor, r, rows.data() + 16 * r);
    return rows;
}

inline void finish(const Product &product) {
    const uint32_t *a = product.a;
    uint32_t(*all)[WORDS] = meet(a, 4, 0xFFFFFFFFu);
    bool is_whole = std::memcmp(a, product.a_then, sizeof product.a_then) == 0 &&
                    read_rows(product.b, 8 * product.tiles) == product.b_then;
    int g = lane() / 4, j = lane() % 4;
    for (int n = 0; n < 4 * product.tiles; n++) {
        const uint16_t *column = product.b_then.data() + 16 * (n / 4 * 8 + 2 * j + n % 2);
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) {
            uint32_t pair = all[g * 4 + k % 8 / 2][n / 2 % 2 + 2 * (k / 8)];
            sum += float_of_bf16(pair >> 16 * (k % 2) & 0xFFFF) * float_of_bf16(column[k]);
        }
        product.c[n] = is_whole ? product.c[n] + sum : std::nanf("");
    }
}

inline void await_product_groups(size_t left) {
    std::vector<std::vector<Product>> &groups = me().product_groups;
    while (groups.size() > left) {
        for (const Product &product : groups.front()) finish(product);
        groups.erase(groups.begin());
    }
}

}  // namespace emulation

DEVICE uint32_t shared_address(const void *shared) {
    return (uint32_t)(static_cast<const char *>(shared) - emulation::dynamic_shared) + emulation::FIRST_ADDRESS;
}
template <int tiles> DEVICE void multiply_async(float (&c)[tiles][4], const uint32_t (&a)[4], uint64_t b) {
    using namespace emulation;
    if (now->num_threads % WARPGROUP) stop("multiplies with fewer than four warps");
    if (!me().may_multiply) stop("multiplies operands that it did not fence");
    if (now->reads_too_early) stop("multiplies what was copied and not shown");
    Product product = {&c[0][0], a, b, tiles, {a[0], a[1], a[2], a[3]}, read_rows(b, 8 * tiles)};
    me().open_products.push_back(std::move(product));
}
DEVICE void store_matrices_transposed(void *row, const uint32_t (&r)[4]) {
    using namespace emulation;
    if (reinterpret_cast<uintptr_t>(row) % 16) stop("writes a matrix row that is not aligned");
    uint32_t(*all)[WORDS] = meet(r, 4, 0xFFFFFFFFu);
    int matrix = lane() / 8, column = lane() % 8;
    uint16_t *to = static_cast<uint16_t *>(row);
    for (int n = 0; n < 8; n++) to[n] = (uint16_t)(all[4 * n + column / 2][matrix] >> 16 * (column % 2));
}
DEVICE void begin_products() { emulation::me().may_multiply = true; }
DEVICE void show_copies() { emulation::me().has_unseen = false; }
DEVICE void commit_products() {
    emulation::me().product_groups.push_back(std::move(emulation::me().open_products));
    emulation::me().open_products.clear();
    emulation::me().may_multiply = false;
}
template <int left> DEVICE void await_products() { emulation::await_product_groups(left); }
DEVICE void settle(float &) {}

#endif
