"""Faults in the ops: quantize, dequantize, guided_quantize, and the straight-through estimators over them."""

from tests.mutants.mutation import Mutation

_QUANTIZE = "src/tracefp4/formats/encoding.py"
_DEQUANTIZE = "src/tracefp4/ops/dequantize/reference.py"
_GUIDED = "src/tracefp4/ops/guided_quantize/reference.py"
_DECODING = "src/tracefp4/ops/guided_quantize/decoding.py"
_CELLS = "src/tracefp4/ops/guided_quantize/cells.py"
_STE = "src/tracefp4/qat/ste.py"
_TEST_QUANTIZE = "tests/ops/test_quantize.py::"
_TEST_GUIDED = "tests/ops/test_guided_quantize.py::"
_TEST_STE = "tests/qat/test_ste.py::"

QUANTIZE = (
    Mutation(
        name="codes_against_the_unrounded_scale",
        fault="Codes are chosen against amax / 6, but the stored byte is a rounded one.",
        path=_QUANTIZE,
        old="round_magnitude_(scaled(magnitude, block_scales, outer, scheme), scheme.tie)",
        new="round_magnitude_(\n"
        "        magnitude / (operand.amax / 6 + 1e-45).repeat_interleave(scheme.block_size, -1), scheme.tie\n    )",
        tests=(
            _TEST_QUANTIZE + "test_every_bf16_number_under_every_scale_byte_of_two_binades",
            _TEST_QUANTIZE + "test_golden_bytes",
        ),
    ),
    Mutation(
        name="codes_with_the_scale_of_another_block",
        fault="Every block is divided by its neighbour's scale.",
        path="src/tracefp4/formats/selection.py",
        old="factor, multiplies = element_factor(block_scales, outer, scheme)",
        new="factor, multiplies = element_factor(block_scales.roll(1, -1), outer, scheme)",
        tests=(_TEST_QUANTIZE + "test_golden_bytes",),
    ),
    Mutation(
        name="codes_of_nan_blocks_not_cleared",
        fault="What is not finite reaches the grid, which knows no NaN.",
        path=_QUANTIZE,
        old="x, magnitude = x.masked_fill(~keep, 0.0), magnitude.masked_fill(~keep, 0.0)",
        new="x = x.masked_fill(~keep, 0.0)",
        tests=(_TEST_QUANTIZE + "test_spc_1_rounding_sees_finite_values_only",),
    ),
    Mutation(
        name="signs_of_nan_blocks_not_cleared",
        fault="The codes of a block that is not finite keep the signs of its values.",
        path=_QUANTIZE,
        old="x, magnitude = x.masked_fill(~keep, 0.0), magnitude.masked_fill(~keep, 0.0)",
        new="magnitude = magnitude.masked_fill(~keep, 0.0)",
        tests=(_TEST_QUANTIZE + "test_spc_1_a_block_that_is_not_finite_reads_back_nan",),
    ),
    Mutation(
        name="quantize_through_bf16",
        fault="A float32 input is rounded to bf16 first.",
        path=_QUANTIZE,
        old="x = signed_zeros(x.detach().resolve_neg().to(torch.float32).contiguous(), scheme.sign)",
        new="x = signed_zeros(x.detach().to(torch.bfloat16).to(torch.float32).contiguous(), scheme.sign)",
        tests=(_TEST_QUANTIZE + "test_golden_bytes",),
    ),
    Mutation(
        name="quantize_ignores_strides",
        fault="A view is read as if its elements were neighbours in memory.",
        path=_QUANTIZE,
        old="x = signed_zeros(x.detach().resolve_neg().to(torch.float32).contiguous(), scheme.sign)",
        new="x = x.detach().to(torch.float32)\n    x = x.as_strided(x.shape, x.contiguous().stride())",
        tests=(_TEST_QUANTIZE + "test_shp_2_views_equal_their_contiguous_copies",),
    ),
    Mutation(
        name="quantize_writes_its_input",
        fault="Magnitudes are taken in place.",
        path=_QUANTIZE,
        old="magnitude = x.abs()",
        new="x, magnitude = x.clone(), x.abs_()",
        tests=(_TEST_QUANTIZE + "test_the_input_is_never_written",),
    ),
)

DEQUANTIZE = (
    Mutation(
        name="swap_nibbles_in_dequantize",
        fault="The high nibble is read as the even index.",
        path=_DEQUANTIZE,
        old="[_VALUES[byte & 15], _VALUES[byte >> 4]]",
        new="[_VALUES[byte >> 4], _VALUES[byte & 15]]",
        tests=("tests/ops/test_dequantize.py::test_zero_codes_keep_their_sign",),
    ),
    Mutation(
        name="dequantize_with_the_scale_of_another_block",
        fault="Every block is multiplied by its neighbour's scale.",
        path=_DEQUANTIZE,
        old="mul_(t.scales().unsqueeze(-1))",
        new="mul_(t.scales().roll(1, -1).unsqueeze(-1))",
        tests=(_TEST_QUANTIZE + "test_golden_bytes",),
    ),
    Mutation(
        name="dequantize_rounds_the_scale_to_bf16_early",
        fault="Values are formed in a narrow dtype before the scale is applied.",
        path=_DEQUANTIZE,
        old="return values.to(dtype)",
        new="return values.to(torch.float16).to(dtype)",
        tests=("tests/ops/test_dequantize.py::test_all_scale_bytes_times_all_codes_are_exact",),
    ),
)

GUIDED_SCALES = (
    Mutation(
        name="guide_scales_of_another_block",
        fault="Recorded scales are assigned to blocks in the wrong order.",
        path=_GUIDED,
        old="block_scales_NG, outer = guide.block_scales, guide.outer",
        new="block_scales_NG, outer = guide.block_scales.flip(-1), guide.outer",
        tests=(_TEST_GUIDED + "test_stored_scales_reproduce_the_bytes_of_dequantized_values",),
    ),
    Mutation(
        name="guide_scales_ignored",
        fault="Rows follow recorded codes under their own block scales.",
        path=_GUIDED,
        old="block_scales_NG = torch.where(guide.valid[:, None], recovered_NG, block_scales_NG)",
        new="block_scales_NG = block_scales_NG",
        tests=(_TEST_GUIDED + "test_rows_without_a_record_round_to_nearest_under_their_own_scales",),
    ),
    Mutation(
        name="guide_outer_scale_ignored",
        fault="Rows follow recorded block scales under their own outer scale.",
        path=_GUIDED,
        old="outer = outer if guide.outer is None else torch.where(guide.valid, guide.outer, outer)",
        new="outer = outer",
        tests=(_TEST_GUIDED + "test_rows_without_a_record_round_to_nearest_under_their_own_scales",),
    ),
    Mutation(
        name="guide_hides_nan",
        fault="A block of today's values with NaN takes the recorded scale and looks finite.",
        path=_GUIDED,
        old="block_scales_NG = block_scales_NG.masked_fill(~finite_NG, scheme.nan_byte)",
        new="pass",
        tests=(_TEST_GUIDED + "test_spc_1_guidance_never_hides_what_is_not_finite",),
    ),
    Mutation(
        name="guide_skips_the_search_for_nan",
        fault="Fully recorded rows are taken to be finite.",
        path=_GUIDED,
        old="bool(guide.valid.all()) and math.isfinite(x_NK.sum().item()):",
        new="bool(guide.valid.all()) and math.isfinite(0.0):",
        tests=(_TEST_GUIDED + "test_spc_1_guidance_never_hides_what_is_not_finite",),
    ),
)

GUIDED = (
    Mutation(
        name="guided_values_truncated_to_bf16",
        fault="Values under a float32 outer scale are cut to bf16 instead of rounded.",
        path=_GUIDED,
        old="values=values_NK.to(x.dtype),",
        new="values=(values_NK.view(torch.int32) & -65536).view(torch.float32).to(x.dtype),",
        tests=("tests/ops/test_guided_schemes.py::test_dty_1_bf16_values_are_rounded_once_ties_to_even",),
    ),
    Mutation(
        name="guide_of_the_other_sign_followed",
        fault="A recorded codeword of the other sign pulls the magnitude up instead of to 0.",
        path=_DECODING,
        old="goal_NK = is_same_sign_NK.bitwise_and_(recorded_NK).bitwise_and_(7)",
        new="goal_NK = recorded_NK & 7",
        tests=(_TEST_GUIDED + "test_full_codes_equal_brute_force_on_every_boundary",),
    ),
    Mutation(
        name="guide_copied_beyond_the_bracket",
        fault="Full codes are copied, however far today's value has moved.",
        path=_DECODING,
        old="return torch.minimum(torch.maximum(goal_NK, lower_NK, out=lower_NK), upper_NK, out=upper_NK)",
        new="return goal_NK",
        tests=(_TEST_GUIDED + "test_full_codes_equal_brute_force_on_every_boundary",),
    ),
    Mutation(
        name="bracket_decoder_takes_the_wrong_neighbour",
        fault="A bit that differs moves away from the value.",
        path=_DECODING,
        old='if guide.decoder == "bracket":\n        steps_NK = _towards(position)',
        new='if guide.decoder == "bracket":\n        steps_NK = _towards(position).neg_()',
        tests=(_TEST_GUIDED + "test_bracket_equals_brute_force_on_every_boundary",),
    ),
    Mutation(
        name="nearest_cell_middle_is_the_value",
        fault="The cells of 2 and 4, which are not symmetric, are split at the value.",
        path=_CELLS,
        old="eighths_NK = (code_NK >> 1).sub_(1).bitwise_and_(is_even_NK)",
        new="eighths_NK = (code_NK >> 1).sub_(1).clamp_(max=0).bitwise_and_(is_even_NK)",
        tests=(_TEST_GUIDED + "test_nearest_cell_equals_a_search_over_15_codewords_on_every_boundary",),
    ),
    Mutation(
        name="nearest_cell_leaves_zero_downwards",
        fault="At code 0 a differing bit gives code -1.",
        path=_CELLS,
        old="eighths_NK = (code_NK >> 1).sub_(1).bitwise_and_(is_even_NK)",
        new="eighths_NK = (code_NK >> 1).sub_(1).clamp_(min=0).bitwise_and_(is_even_NK)",
        tests=(_TEST_GUIDED + "test_mantissa_bits_equal_brute_force_on_every_bf16_number[nearest_cell-1]",),
    ),
    Mutation(
        name="guide_followed_in_rows_without_a_record",
        fault="What an absent row holds decides codes.",
        path=_GUIDED,
        old="is_usable_NG = (decode_scale_NG > 0).logical_and_(guide.valid[:, None])",
        new="is_usable_NG = decode_scale_NG > 0",
        tests=(_TEST_GUIDED + "test_rows_without_a_record_round_to_nearest_under_their_own_scales",),
    ),
    Mutation(
        name="guide_followed_in_blocks_of_scale_zero",
        fault="A block whose recorded scale is 0 gets non-zero codes.",
        path=_DECODING,
        old="if bool(is_usable_NG.all()):",
        new="if bool(is_usable_NG.any()):",
        tests=(_TEST_GUIDED + "test_a_recorded_zero_scale_gives_zero_and_no_code",),
    ),
    Mutation(
        name="guide_with_negative_scales_accepted",
        fault="Bytes above 0x7F of a damaged record are used as scales.",
        path=_GUIDED,
        old="if most > scheme.nan_byte:",
        new="if most > 255:",
        tests=(_TEST_GUIDED + "test_refusals",),
    ),
    Mutation(
        name="guided_sign_of_zero_lost",
        fault="Values that round to zero lose their sign.",
        path=_GUIDED,
        old="values_NK.copysign_(scaled.x_NK)",
        new="values_NK.mul_(torch.sign(scaled.x_NK))",
        tests=(_TEST_GUIDED + "test_rnd_6_signed_zeros",),
    ),
)

STE = (
    Mutation(
        name="ste_zero_on_the_bound",
        fault="A value exactly at the largest codeword loses its gradient.",
        path=_STE,
        old="return x.detach().abs() <= bound",
        new="return x.detach().abs() < bound",
        tests=(_TEST_STE + "test_ste_1_values_on_the_bound_keep_their_gradient",),
    ),
    Mutation(
        name="ste_mask_beyond_the_bound",
        fault="Values that were clipped keep their gradient under the mask.",
        path=_STE,
        old="return x.detach().abs() <= bound",
        new="return x.detach().abs() <= bound * 1.25",
        tests=(_TEST_STE + "test_ste_4_a_static_scale_that_saturates_blocks_the_gradient_above_it_only",),
    ),
    Mutation(
        name="ste_mask_with_the_scale_of_another_block",
        fault="Scales are tiled instead of repeated.",
        path=_STE,
        old=".repeat_interleave(block_size, dim=-1)",
        new=".repeat(*[1] * (scales.dim() - 1), block_size)",
        tests=(_TEST_STE + "test_clip_mask_of_zero_and_non_finite_blocks",),
    ),
    Mutation(
        name="ste_mask_dropped",
        fault="The backward ignores the mask that it was given.",
        path=_STE,
        old="return (grad * ctx.saved_tensors[0] if ctx.saved_tensors else grad), None, None",
        new="return grad, None, None",
        tests=(_TEST_STE + "test_a_masked_gradient_is_the_incoming_one_elsewhere",),
    ),
    Mutation(
        name="ste_by_adding_the_difference",
        fault="x + (x_hat - x) is not x_hat in floating point.",
        path=_STE,
        old="return QuantizedForwardStraightThrough.apply(x, x_hat.detach(), keep)",
        new="y = x + (x_hat - x).detach()\n    return QuantizedForwardStraightThrough.apply(x, y, keep)",
        tests=(_TEST_STE + "test_ste_3_gradient_is_ones_in_the_dtype_of_x_and_nothing_else_gets_one",),
    ),
    Mutation(
        name="ste_gradient_by_round_and_clamp",
        fault="The gradient is that of a clamp, 0 outside the range of codes.",
        path=_STE,
        old="return QuantizedForwardStraightThrough.apply(x, x_hat.detach(), keep)",
        new="keep = x.detach().abs() < 6.0 if keep is None else keep\n"
        "    return QuantizedForwardStraightThrough.apply(x, x_hat.detach(), keep)",
        tests=(_TEST_STE + "test_ste_1_values_on_the_bound_keep_their_gradient",),
    ),
    Mutation(
        name="bf16_through_without_rounding",
        fault="The forward of the bf16 estimator rounds nothing.",
        path=_STE,
        old="return round_bf16(x)\n",
        new="return x.clone()\n",
        tests=(_TEST_STE + "test_bf16_rounding_is_straight_through",),
    ),
)

MUTATIONS = (*QUANTIZE, *DEQUANTIZE, *GUIDED_SCALES, *GUIDED, *STE)
