/* kv_quantize_append on a GPU: K and V rows become codes, which go to the rows that are recorded and to the pages. A
 * thread takes a block; blockIdx.y is 0 for K and 1 for V. Tokens lie k_stride and v_stride blocks apart.
 *
 * Defines: SCHEME, with a static power of two and blocks of 16; DTYPE. */

#include "blocks.cuh"
#include "places.cuh"

KERNEL quantize_append(const void *k, const void *v, const int64_t *slots, int num_tokens, int num_heads, int num_blocks,
                       int num_slots, int k_stride, int v_stride, int k_exponent, int v_exponent, int k_order,
                       int v_order, uint8_t *k_packed, uint8_t *k_scales, uint8_t *v_packed, uint8_t *v_scales,
                       uint8_t *k_pages, uint8_t *k_page_scales, uint8_t *v_pages, uint8_t *v_page_scales) {
    await_earlier();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    struct block_of_rows place = place_of(i, num_heads, num_blocks);
    int token = place.token, is_v = (int)blockIdx.y;
    if (token >= num_tokens) return;
    int64_t slot = slot_of(slots, token, num_slots);
    const void *x = is_v ? v : k;
    float scale = power_of_two(is_v ? v_exponent : k_exponent);
    struct outer outer = {scale, scale, power_of_two(is_v ? -v_exponent : -k_exponent)};
    int64_t at = i + (int64_t)token * ((is_v ? v_stride : k_stride) - num_heads * num_blocks);
    struct encoded found = encode(load_block(x, at), x, at, outer, nullptr);
    store_block(found, i, is_v ? v_scales : k_scales, is_v ? v_packed : k_packed);
    struct pages pages = {is_v ? v_pages : k_pages, is_v ? v_page_scales : k_page_scales, is_v ? v_order : k_order,
                          num_slots, num_blocks};
    put_block(pages, place.head, slot, place.block, make_uint2(found.word[0], found.word[1]), found.byte);
}
