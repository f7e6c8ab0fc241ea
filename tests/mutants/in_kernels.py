"""Faults in C and in what calls it. A fault that the self-check of a library sees makes the library refused, which
`test_self_check.py` reports; the others must be noticed by the comparison with the reference."""

from tests.mutants.mutation import Mutation

_HEADER = "src/tracefp4/ops/e2m1.h"
_SCALING = "src/tracefp4/ops/scaling.h"
_QUANTIZE = "src/tracefp4/ops/quantize/kernel.c"
_SEARCH = "src/tracefp4/ops/search_scales/kernel.c"
_GUIDED = "src/tracefp4/ops/guided_quantize/kernel.c"
_CELLS = "src/tracefp4/ops/guided_quantize/cells.h"
_TEST_QUANTIZE = "tests/ops/test_compiled.py::test_quantize[NVFP4_ROW_POW2-torch.float32]"
_TEST_4OVER6 = "tests/ops/test_compiled.py::test_quantize[NVFP4_ROW_POW2_4OVER6_MAE-torch.float32]"
_TEST_DEQUANTIZE = "tests/ops/test_compiled.py::test_dequantize[NVFP4_ROW_POW2-torch.float32]"
_TEST_SEARCH = "tests/ops/test_compiled.py::test_search_scales[NVFP4_ROW_POW2]"
_TEST_GUIDED = "tests/ops/test_compiled.py::test_guided_quantize[NVFP4_ROW_POW2-full]"
_SELF_CHECK = "tests/ops/test_self_check.py::test_a_library_is_refused_only_for_want_of_a_compiler"

NUMBERS = (
    Mutation(
        name="c_swap_nibbles",
        fault="The even index goes into the high nibble.",
        path=_HEADER,
        old="packed[j] = (uint8_t)(pair | pair >> 4);",
        new="packed[j] = (uint8_t)(pair << 4 | pair >> 8);",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_tie_toward_zero",
        fault="The tie between .5 and 1 goes down.",
        path=_HEADER,
        old="(z >= 0.75f)",
        new="(z > 0.75f)",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_floor_dropped",
        fault="A tiny block stores scale 0 and is lost.",
        path=_SCALING,
        old="found = choose(found == 0, underflow, found);",
        new="",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_scale_without_clamp_at_448",
        fault="A block scale above 448 wraps into the NaN byte or beyond.",
        path=_SCALING,
        old="encode_e4m3(float_of((uint32_t)least((int32_t)bits_of(raw), MAX_SCALE_BITS)))",
        new="encode_e4m3(raw)",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_k_one_too_large_at_its_boundary",
        fault="amax = 2688 * 2^k exactly takes k + 1.",
        path=_HEADER,
        old="0x7FFFFF - (limit_bits & 0x7FFFFF)",
        new="0x800000 - (limit_bits & 0x7FFFFF)",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_k_without_clamp",
        fault="Tiny rows take exponents below -110.",
        path=_HEADER,
        old="least(most(k, MIN_EXPONENT), MAX_EXPONENT)",
        new="least(most(k, -125), MAX_EXPONENT)",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_e4m3_largest_subnormal",
        fault="Byte 7 is decoded as a normal number.",
        path=_HEADER,
        old="choose(magnitude < 8, subnormal, normal)",
        new="choose(magnitude < 7, subnormal, normal)",
        tests=(_TEST_DEQUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_e8m0_byte_0",
        fault="2^-127 is flushed to 0.",
        path=_HEADER,
        old="choose(byte == 0, 0x00400000, byte << 23)",
        new="byte << 23",
        tests=(_TEST_DEQUANTIZE.replace("NVFP4_ROW_POW2", "MXFP4_FLOOR"), _SELF_CHECK),
    ),
    Mutation(
        name="c_fp16_infinity_is_a_number",
        fault="Inf in fp16 is read as 65536.",
        path=_HEADER,
        old="bits |= magnitude >= 0x7C00 ? INF_BITS : 0;",
        new="",
        tests=(
            "tests/ops/test_compiled.py::test_quantize_reads_other_dtypes[NVFP4_ROW_POW2-torch.float16]",
            _SELF_CHECK,
        ),
    ),
    Mutation(
        name="c_fp16_subnormals_by_way_of_float32_ones",
        fault="fp16 below 2^-14 is 0 in a thread that flushes float32 subnormals.",
        path=_HEADER,
        old="bits_of((float)(int32_t)magnitude * 0x1p-24f)",
        new="bits_of(float_of(magnitude << 13) * 0x1p112f)",
        tests=(
            "tests/ops/test_compiled.py::test_subnormals_of_fp16_are_read_where_float32_flushes_its_own",
            _SELF_CHECK,
        ),
    ),
)

QUANTIZE = (
    Mutation(
        name="c_element_times_a_reciprocal",
        fault="x is multiplied by 1 / decode_scale, which misses ties.",
        path=_SCALING,
        old="magnitude_code(multiplies ? magnitude * by : magnitude / by, tie)",
        new="magnitude_code(multiplies ? magnitude * by : magnitude * (1.0f / by), tie)",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_signs_of_nan_blocks_not_cleared",
        fault="The codes of a block that is not finite keep what they hold.",
        path=_SCALING,
        old="strip->amax_bits[start / block] < INF_BITS ? 15 : 0",
        new="15",
        tests=(_TEST_QUANTIZE, _SELF_CHECK),
    ),
    Mutation(
        name="c_first_exponent_for_all_matrices",
        fault="Every matrix of a stack takes the outer scale of the first.",
        path=_QUANTIZE,
        old="rows_per_outer ? row / rows_per_outer : row)",
        new="rows_per_outer ? 0 : row)",
        tests=("tests/ops/test_quantize.py::test_tensor_scheme_has_one_exponent_per_matrix", _SELF_CHECK),
    ),
    Mutation(
        name="c_errors_added_in_another_order",
        fault="The tree sum of four-over-six runs from left to right at its end.",
        path=_SCALING,
        old="until = sum == TREE ? 1",
        new="until = sum == TREE ? 4",
        tests=("tests/ops/test_compiled.py::test_errors_are_added_in_the_order_of_the_scheme", _SELF_CHECK),
    ),
    Mutation(
        name="c_four_over_six_ties_to_4",
        fault="Equal errors take amax / 4.",
        path=_SCALING,
        old="error_of_four[lane] < error_of_six[lane]",
        new="error_of_four[lane] <= error_of_six[lane]",
        tests=(_TEST_4OVER6, _SELF_CHECK),
    ),
    Mutation(
        name="c_given_scales_hide_nan",
        fault="A block that is not finite keeps the scale that was given for it.",
        path=_SCALING,
        old="choose(strip->amax_bits[g] < INF_BITS, block_scales[g], nan_byte)",
        new="block_scales[g]",
        tests=(
            "tests/ops/test_compiled.py::test_quantize_with_scales",
            "tests/ops/test_guided_quantize.py::test_spc_1_guidance_never_hides_what_is_not_finite",
            _SELF_CHECK,
        ),
    ),
    Mutation(
        name="c_outer_scale_of_zeros",
        fault="A row of zeros stores the smallest outer scale instead of 1.",
        path=_SCALING,
        old="amax == 0.0f ? zero : found",
        new="found",
        tests=("tests/ops/test_compiled.py::test_quantize[NVFP4_ROW_FP32-torch.float32]", _SELF_CHECK),
    ),
)

SEARCH = (
    Mutation(
        name="c_search_takes_the_last_of_equals",
        fault="Equal errors move a block away from the byte of its maximum.",
        path=_SEARCH,
        old="error[lane] < least_error[lane]",
        new="error[lane] <= least_error[lane]",
        tests=(_TEST_SEARCH, _SELF_CHECK),
    ),
    Mutation(
        name="c_search_wakes_flushed_blocks",
        fault="A block that the scheme stores as zeros is searched.",
        path=_SEARCH,
        old="choose(byte[lane] != 0, (uint32_t)tried, 0)",
        new="(uint32_t)tried",
        tests=(_TEST_SEARCH.replace("ROW_POW2", "VLLM"), _SELF_CHECK),
    ),
    Mutation(
        name="c_search_importances_of_the_first_row",
        fault="Every row is weighed by the importances of the first.",
        path=_SEARCH,
        old="importance + importance_row[row] * width",
        new="importance",
        tests=(_TEST_SEARCH, _SELF_CHECK),
    ),
)

GUIDED = (
    Mutation(
        name="c_nearest_cell_tie_up",
        fault="A value in the middle of its rounding cell goes to the larger magnitude.",
        path=_CELLS,
        old="z <= code_magnitude(m) + 0.125f * (float)eighths",
        new="z < code_magnitude(m) + 0.125f * (float)eighths",
        tests=(
            "tests/ops/test_guided_quantize.py::test_nearest_cell_equals_a_search_over_15_codewords_on_every_boundary",
            _SELF_CHECK,
        ),
    ),
    Mutation(
        name="c_guide_of_the_other_sign_followed",
        fault="A recorded codeword of the other sign pulls the magnitude up instead of to 0.",
        path=_CELLS,
        old="choose((decision >> 3 & 1) == sign, decision & 7, 0)",
        new="(decision & 7)",
        tests=(_TEST_GUIDED, _SELF_CHECK),
    ),
    Mutation(
        name="c_guide_followed_in_blocks_of_scale_zero",
        fault="A block whose recorded scale is 0 gets non-zero codes.",
        path=_GUIDED,
        old="int32_t is_guided = scale > 0.0f;",
        new="int32_t is_guided = scale >= 0.0f;",
        tests=("tests/ops/test_compiled.py::test_random_guides_of_random_rows", _SELF_CHECK),
    ),
    Mutation(
        name="c_guided_codes_of_nan_blocks",
        fault="A block of today's values with NaN follows the recorded codes.",
        path=_GUIDED,
        old="strip->amax_bits[start / block] < INF_BITS ? 0xFFFFFFFF : 0",
        new="0xFFFFFFFF",
        tests=(_TEST_GUIDED, _SELF_CHECK),
    ),
    Mutation(
        name="c_recorded_outer_scale_replaced",
        fault="A recorded row takes the outer scale of today's values, under which its bytes mean something else.",
        path=_GUIDED,
        old="if (is_row_scheme && !is_valid)",
        new="if (is_row_scheme)",
        tests=(_TEST_GUIDED, _SELF_CHECK),
    ),
    Mutation(
        name="c_recorded_block_scales_replaced",
        fault="A recorded row takes the block scales of today's values.",
        path=_GUIDED,
        old="if (is_valid)\n            read_block_scales",
        new="if (0)\n            read_block_scales",
        tests=(_TEST_GUIDED, _SELF_CHECK),
    ),
    Mutation(
        name="c_guided_zeros_keep_their_sign",
        fault="A zero keeps its sign under a scheme that stores zeros of one sign.",
        path=_GUIDED,
        old="if (zero != KEPT) sign =",
        new="if (0) sign =",
        tests=(_TEST_GUIDED.replace("ROW_POW2", "ROW_TRANSFORMER_ENGINE"), _SELF_CHECK),
    ),
)

CALLERS = (
    Mutation(
        name="c_last_span_lost",
        fault="The last rows of a tensor that threads share are never written.",
        path="src/tracefp4/ops/kernels.py",
        old="for i in range(num_spans)])",
        new="for i in range(num_spans - 1)])",
        tests=("tests/ops/test_compiled.py::test_threads_do_not_change_a_byte",),
    ),
    Mutation(
        name="c_fused_multiply_add",
        fault="The compiler may contract a product and a sum, which rounds once instead of twice.",
        path="src/tracefp4/ops/compiler.py",
        old="-ffp-contract=off",
        new="-ffp-contract=fast",
        tests=("tests/ops/test_compiler.py::test_the_flags_keep_ieee_arithmetic",),
    ),
)

MUTATIONS = (*NUMBERS, *QUANTIZE, *SEARCH, *GUIDED, *CALLERS)
