"""Faults in the KV cache on GPUs: the order of pages, appending to them, attention over them."""

from tests.mutants.mutation import Mutation

_ATTEND = "src/tracefp4/ops/kv_attention/kernel.cu"
_SPLIT_SUMS = "src/tracefp4/ops/kv_attention/splits.cuh"
_PAGES = "src/tracefp4/ops/kv_attention/pages.cuh"
_PLACES = "src/tracefp4/ops/kv_append/places.cuh"
_ORDER = "src/tracefp4/formats/fragments.py"
_TESTS = "tests/ops/test_kv_attention_device.py"
_DECODING = f"{_TESTS}::test_decoding_equals_float64_attention"
_SPLITS = f"{_TESTS}::test_splits_prefill_and_batches_change_no_bit"
_APPEND = "tests/ops/test_kv_append_device.py"
_ROUNDED = """\
            if (ROUNDS) {
                uint32_t rounded = bf16x2_of(x, y);
                x = float_of(rounded << 16);
                y = float_of(rounded & 0xFFFF0000u);
            }
"""
_SUMMED = """\
            sums.l[n][0] += x;
            sums.l[n][1] += y;
"""

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="cache_tile_read_before_all_lanes_have_it",
        fault="A warp reads scales that other lanes copied, without a barrier of the warp.",
        path=_ATTEND,
        old="            __syncwarp(); /* the tile is there for all lanes, and nobody reads the one before it */\n",
        new="",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_tile_read_before_it_is_there",
        fault="One copy too many is left under way.",
        path=_ATTEND,
        old="await_copies<STAGES - 2>();",
        new="await_copies<STAGES - 1>();",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_warps_merged_before_all_are_done",
        fault="The largest scores of the warps are read without a barrier after they were written.",
        path=_SPLIT_SUMS,
        old="    __syncthreads();\n    if (thread >= COLUMNS) return;\n",
        new="    if (thread >= COLUMNS) return;\n",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_next_token_seen",
        fault="A query sees the token after its own.",
        path=_ATTEND,
        old="token + g + 8 * (c / 2) >= queries.num_visible",
        new="token + g + 8 * (c / 2) > queries.num_visible",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_last_tile_not_masked",
        fault="A tile that holds a token that some query sees hides none from it.",
        path=_ATTEND,
        old="if (token + TILE > queries.seen_by_all)",
        new="if (token >= queries.seen_by_all)",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_split_looked_up_again",
        fault="The tiles of a split are those of the split before it.",
        path=_ATTEND,
        old="later = number_in(next / SPLIT_TILES + 1);",
        new="later = number_in(next / SPLIT_TILES);",
        tests=(_SPLITS,),
    ),
    Mutation(
        name="cache_exchanged_sums_overwritten",
        fault="Warps write the next dims of their sums while others still read the last.",
        path=_SPLIT_SUMS,
        old="        }\n        __syncthreads();\n    }\n}\n",
        new="        }\n    }\n}\n",
        tests=(_DECODING, _SPLITS),
    ),
    Mutation(
        name="cache_signs_moved_with_magnitudes",
        fault="The sign of the high code of a byte is taken from two bits above.",
        path=_PAGES,
        old="chosen_bits(0x0E0E0E0Eu, word >> 2, word)",
        new="chosen_bits(0x8E8E8E8Eu, word >> 2, word)",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_last_split_forgotten",
        fault="The splits' sums are combined without the one that holds the query's own token.",
        path=_ATTEND,
        old="split <= (int)(position / SPLIT)",
        new="split < (int)(position / SPLIT)",
        tests=(_SPLITS,),
    ),
    Mutation(
        name="cache_splits_stored_in_one_place",
        fault="A block that takes several splits stores all of them at the place of its first.",
        path=_SPLIT_SUMS,
        old="(int64_t)blockIdx.x * problem.num_splits + split;",
        new="(int64_t)blockIdx.x * problem.num_splits + (int64_t)blockIdx.z * split;",
        tests=(_SPLITS,),
    ),
    Mutation(
        name="cache_unseen_split_folded",
        fault="A column takes part in a split of which it sees nothing.",
        path=_SPLIT_SUMS,
        old="    if (merged.num_visible[column] <= split * SPLIT) return;\n",
        new="",
        tests=(f"{_TESTS}::test_nan_in_a_split_reaches_only_those_who_see_it",),
    ),
    Mutation(
        name="cache_sums_not_rescaled",
        fault="Half of the sums keep their old power of two when a larger score is met.",
        path=_ATTEND,
        old="                sums.o[n][k][2 + i] *= factor;\n",
        new="",
        tests=(_SPLITS,),
    ),
    Mutation(
        name="cache_unrounded_weights_summed",
        fault="What V is divided by is the sum of other probabilities than those it was multiplied by.",
        path=_ATTEND,
        old=_ROUNDED + _SUMMED,
        new=_SUMMED + _ROUNDED,
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_scales_of_the_other_token",
        fault="Keys of tokens g and g + 8 change their scales.",
        path=_PAGES,
        old="of_g = twice_low(two), of_g_8 = twice_high(two)",
        new="of_g = twice_high(two), of_g_8 = twice_low(two)",
        tests=(_DECODING,),
    ),
    Mutation(
        name="cache_queries_not_rescaled",
        fault="Queries go to fp16 as they are.",
        path=_ATTEND,
        old="int shift = IS_FP4 ? ",
        new="int shift = 0 ? ",
        tests=(f"{_TESTS}::test_queries_far_outside_of_fp16",),
    ),
    Mutation(
        name="cache_append_to_the_neighbour",
        fault="V of odd tokens is written over that of even ones.",
        path=_PLACES,
        old="chunk[(c * 4 + row / 2) * 16 + token % 2 * 2] = byte;",
        new="chunk[(c * 4 + row / 2) * 16] = byte;",
        tests=(f"{_APPEND}::test_appended_bytes_are_those_of_the_reference",),
    ),
    Mutation(
        name="cache_rows_without_a_slot_stored",
        fault="A token without a slot, which fills a batch up, is written to the first one.",
        path=_PLACES,
        old="    if (slot < 0) return;",
        new="    if (slot < 0) slot = 0;",
        tests=(
            f"{_APPEND}::test_a_token_without_a_slot_leaves_no_trace",
            f"{_APPEND}::test_a_token_without_a_slot_is_quantized_and_not_stored",
        ),
    ),
    Mutation(
        name="cache_scales_of_v_in_the_order_of_k",
        fault="The order of V's scales is that of K's, when appending and when converting.",
        path=_ORDER,
        old="scales = (row // 2 * num_blocks + block) * 4 + upper * 2 + token % 2",
        new="scales = (row * num_blocks + block) * 2 + upper",
        tests=("tests/formats/test_fragments.py::test_a_word_is_the_fragment_of_its_lane",),
    ),
    Mutation(
        name="cache_frames_compared_in_their_order",
        fault="A frame in fragment order is compared with a record as it lies.",
        path="src/tracefp4/kvcache/pool.py",
        old="        plain = from_fragments(replace(pages, packed=packed, block_scales=block_scales))\n",
        new="        plain = BlockTensor(\n            packed=packed, block_scales=block_scales, outer=pages.outer, "
        "scheme=pages.scheme\n        )\n",
        tests=("tests/kvcache/test_pool.py::test_frames_in_fragment_order_hold_the_same_bytes",),
    ),
)
