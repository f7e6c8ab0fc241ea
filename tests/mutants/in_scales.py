"""Faults on the way from maxima to scales: outer scale, block scale, the rules of zero, tiny and non-finite blocks."""

from tests.mutants.mutation import Mutation

_SCALING = "src/tracefp4/formats/scaling.py"
_TEST_SCALING = "tests/formats/test_scaling.py::"
_TEST_QUANTIZE = "tests/ops/test_quantize.py::"

MAXIMA = (
    Mutation(
        name="amax_over_all_rows",
        fault="The rows of a row scheme share one maximum.",
        path=_SCALING,
        old="largest = amax.amax(dims)",
        new="largest = amax.amax().expand(amax.amax(dims).shape)",
        tests=(_TEST_QUANTIZE + "test_bat_1_rows_do_not_depend_on_their_batch",),
    ),
    Mutation(
        name="first_row_for_the_matrix",
        fault="The outer scale of a matrix is that of its first row.",
        path=_SCALING,
        old="largest = amax.amax(dims)",
        new='largest = amax.amax(-1) if scheme.outer == "row" else amax.amax(-1)[..., 0]',
        tests=(_TEST_QUANTIZE + "test_tensor_scheme_has_one_exponent_per_matrix",),
    ),
    Mutation(
        name="nonfinite_blocks_in_the_outer_scale",
        fault="A NaN or Inf decides the outer scale of the blocks beside it.",
        path=_SCALING,
        old="return bits.masked_fill_(~finite, 0).view(torch.float32), finite",
        new="return bits.clamp_(max=0x7F7FFFFF).view(torch.float32), finite",
        tests=(_TEST_QUANTIZE + "test_spc_1_a_block_that_is_not_finite_reads_back_nan",),
    ),
    Mutation(
        name="infinity_taken_for_finite",
        fault="Only NaN marks a block, Inf does not.",
        path=_SCALING,
        old="_INF_BITS = 0x7F800000",
        new="_INF_BITS = 0x7F800001",
        tests=("tests/formats/test_scaling.py::test_spc_1_block_maxima_find_the_blocks_that_are_not_finite",),
    ),
)

EXPONENT = (
    Mutation(
        name="k_by_floating_log2",
        fault="The logarithm of a number just above 2688 * 2^k is rounded to k.",
        path=_SCALING,
        old="exponent = (bits + (0x7FFFFF - fraction) >> 23).sub_(exponent_field)",
        new="exponent = torch.log2(amax.clamp(min=1e-45) / (6.0 * scale_max)).ceil().to(torch.int32)",
        tests=(_TEST_SCALING + "test_exponent_around_its_boundaries",),
    ),
    Mutation(
        name="k_one_too_large_at_its_boundary",
        fault="amax = 2688 * 2^k exactly takes k + 1.",
        path=_SCALING,
        old="0x7FFFFF - fraction",
        new="0x800000 - fraction",
        tests=(_TEST_SCALING + "test_exponent_around_its_boundaries",),
    ),
    Mutation(
        name="k_without_clamp",
        fault="Tiny and huge rows take exponents whose scales are no bf16 numbers.",
        path=_SCALING,
        old="return exponent.clamp_(MIN_EXPONENT, MAX_EXPONENT)",
        new="return exponent",
        tests=(_TEST_SCALING + "test_exponent_of_every_bf16_magnitude",),
    ),
    Mutation(
        name="k_of_zeros_is_the_least",
        fault="A row of zeros stores the smallest exponent instead of 0.",
        path=_SCALING,
        old=".mul_(bits != 0)",
        new="",
        tests=(_TEST_SCALING + "test_exponent_of_every_bf16_magnitude",),
    ),
    Mutation(
        name="calibration_without_headroom",
        fault="A static exponent fits the sample and saturates on the next batch.",
        path="src/tracefp4/formats/calibration.py",
        old="HEADROOM_EXPONENT = 3",
        new="HEADROOM_EXPONENT = 0",
        tests=(
            "tests/formats/test_calibration.py::test_kvq_calibration_leaves_headroom_and_keeps_small_values_normal",
        ),
    ),
    Mutation(
        name="calibration_on_nan",
        fault="A sample with NaN gives an exponent.",
        path="src/tracefp4/formats/calibration.py",
        old="if not bool(torch.isfinite(amax).all()):",
        new="if bool(torch.isinf(amax).all()):",
        tests=("tests/formats/test_calibration.py::test_calibration_refuses_what_it_cannot_measure",),
    ),
)

BLOCK_SCALE = (
    Mutation(
        name="floor_dropped",
        fault="A tiny block stores scale 0 and is lost.",
        path=_SCALING,
        old="return torch.maximum(block_scales, is_zero.logical_not_().view(torch.uint8))",
        new="return block_scales",
        tests=(_TEST_QUANTIZE + "test_golden_bytes",),
    ),
    Mutation(
        name="floor_on_zero_blocks",
        fault="A block of zeros stores the smallest scale instead of 0.",
        path=_SCALING,
        old="return torch.maximum(block_scales, is_zero.logical_not_().view(torch.uint8))",
        new="return block_scales.clamp(min=1)",
        tests=(_TEST_QUANTIZE + "test_golden_bytes",),
    ),
    Mutation(
        name="nan_byte_dropped",
        fault="A block with NaN reads back as zeros.",
        path=_SCALING,
        old="    if finite is not None:\n        block_scales = block_scales.masked_fill(~finite, scheme.nan_byte)\n",
        new="",
        tests=(_TEST_QUANTIZE + "test_spc_1_a_block_that_is_not_finite_reads_back_nan",),
    ),
    Mutation(
        name="outer_scale_forgotten_in_decoding",
        fault="Stored block scales are used without the outer scale.",
        path=_SCALING,
        old='return unit.mul_(power_of_two(aligned) if scheme.outer_kind == "exponent" else aligned).to(dtype)',
        new="return unit.to(dtype)",
        tests=("tests/ops/test_dequantize.py::test_all_scale_bytes_times_all_codes_are_exact",),
    ),
    Mutation(
        name="element_times_a_reciprocal",
        fault="x is multiplied by 1 / decode_scale, which misses ties.",
        path=_SCALING,
        old="return divisor_of(decode_scales(block_scales, outer, scheme)), False",
        new="return 1.0 / divisor_of(decode_scales(block_scales, outer, scheme)), True",
        tests=(_TEST_QUANTIZE + "test_golden_bytes",),
    ),
    Mutation(
        name="division_by_a_zero_scale",
        fault="A block of scale 0 divides by it.",
        path=_SCALING,
        old="return torch.where(decode_scale > 0, decode_scale, torch.inf)",
        new="return decode_scale",
        tests=(_TEST_QUANTIZE + "test_spc_1_rounding_sees_finite_values_only",),
    ),
)

MUTATIONS = (*MAXIMA, *EXPONENT, *BLOCK_SCALE)
