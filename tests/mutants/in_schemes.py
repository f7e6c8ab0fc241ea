"""Faults in what distinguishes schemes: orders of operations, the MXFP4 rules, four over six."""

from tests.mutants.mutation import Mutation

_SCALING = "src/tracefp4/formats/scaling.py"
_E8M0 = "src/tracefp4/formats/e8m0.py"
_SELECTION = "src/tracefp4/formats/selection.py"
_TEST_RAW = "tests/formats/test_order.py::test_the_raw_block_scale_is_the_first_half_of_the_formula"
_TEST_Z = "tests/formats/test_order.py::test_rnd_3_the_rounded_number_is_the_second_half_of_the_formula"
_TEST_DECODE = "tests/formats/test_order.py::test_the_decode_scale_is_rounded_to_float32_whatever_the_dtype"
_TEST_E8M0 = "tests/formats/test_e8m0.py::"
_TEST_SELECTION = "tests/formats/test_selection.py::"

ORDERS = (
    Mutation(
        name="scale_times_a_sixth",
        fault="amax is multiplied by a rounded 1/6.",
        path=_SCALING,
        old="return divided(amax * power_of_two(outer, negate=True), 6.0)",
        new="return (amax * power_of_two(outer, negate=True)) * _SIXTH",
        tests=(_TEST_RAW + "[POW2]",),
    ),
    Mutation(
        name="order_modelopt_divides_twice",
        fault="amax / 6 / g in place of amax / (6 * g).",
        path=_SCALING,
        old="return amax / (outer * 6.0)",
        new="return divided(amax, 6.0) / outer",
        tests=(_TEST_RAW + "[MODELOPT]",),
    ),
    Mutation(
        name="order_torchao_multiplies_then_divides",
        fault="amax / (6 * g) in place of amax / 6 / g.",
        path=_SCALING,
        old="return divided(amax, 6.0).div_(outer)",
        new="return amax / (6.0 * outer)",
        tests=(_TEST_RAW + "[TORCHAO]",),
    ),
    Mutation(
        name="order_torchao_factor_in_one_division",
        fault="1 / (g * s) in place of (1 / g) / s.",
        path=_SCALING,
        old="factor = divided(1.0, aligned) / unit",
        new="factor = divided(1.0, aligned * unit)",
        tests=(_TEST_Z + "[TORCHAO]",),
    ),
    Mutation(
        name="order_vllm_divides_by_6",
        fault="A division where the kernels multiply by a rounded 1/6.",
        path=_SCALING,
        old="return divisor * (amax * _SIXTH)",
        new="return divisor * divided(amax, 6.0)",
        tests=(_TEST_RAW + "[VLLM]",),
    ),
    Mutation(
        name="order_transformer_engine_as_vllm",
        fault="1/6 goes to amax instead of G.",
        path=_SCALING,
        old="return amax * (divisor * _SIXTH)",
        new="return (amax * _SIXTH) * divisor",
        tests=(_TEST_RAW + "[TRANSFORMER_ENGINE]",),
    ),
    Mutation(
        name="order_compressed_tensors_by_a_reciprocal",
        fault="amax is multiplied by a rounded 1/6.",
        path=_SCALING,
        old="return divided(amax, 6.0).mul_(divisor)",
        new="return (amax * _SIXTH).mul_(divisor)",
        tests=(_TEST_RAW + "[COMPRESSED_TENSORS]",),
    ),
    Mutation(
        name="order_factor_without_the_inner_reciprocal",
        fault="G / s in place of 1 / (s * (1 / G)).",
        path=_SCALING,
        old="factor = divided(1.0, unit * divided(1.0, divisor_outer(aligned, scheme)))",
        new="factor = divisor_outer(aligned, scheme) / unit",
        tests=(_TEST_Z + "[VLLM]",),
    ),
    Mutation(
        name="order_divides_where_it_multiplies",
        fault="x / (1 / factor) in place of x * factor.",
        path="src/tracefp4/formats/order.py",
        old='return "; x*" in self.value',
        new="return False",
        tests=(_TEST_Z + "[TORCHAO]",),
    ),
    Mutation(
        name="divisor_stored_as_a_multiplier",
        fault="The reciprocal of the outer scale is applied as if it were the scale.",
        path=_SCALING,
        old="return unit.div_(aligned).to(dtype)",
        new="return unit.mul_(aligned).to(dtype)",
        tests=(_TEST_DECODE,),
    ),
    Mutation(
        name="amax_kind_decoded_by_division",
        fault="s / (M / A) in place of (s * A) / M.",
        path=_SCALING,
        old="return divided(unit.mul_(aligned), 6.0 * scheme.scale_max).to(dtype)",
        new="return unit.div_(divided(6.0 * scheme.scale_max, aligned)).to(dtype)",
        tests=(_TEST_DECODE,),
    ),
    Mutation(
        name="divisor_by_its_reciprocal",
        fault="s * (1 / G) in place of s / G.",
        path=_SCALING,
        old="return unit.div_(aligned).to(dtype)",
        new="return unit.mul_(1.0 / aligned).to(dtype)",
        tests=(_TEST_DECODE,),
    ),
)

MXFP4 = (
    Mutation(
        name="mx_floor_rounds",
        fault="FLOOR takes the rounding of EVEN.",
        path=_E8M0,
        old="ScaleRule.FLOOR: 0,",
        new="ScaleRule.FLOOR: 0x200000,",
        tests=(_TEST_E8M0 + "test_ovf_4_golden_exponents",),
    ),
    Mutation(
        name="mx_even_from_1_5",
        fault="EVEN rounds to no mantissa bit instead of one.",
        path=_E8M0,
        old="ScaleRule.EVEN: 0x200000,",
        new="ScaleRule.EVEN: 0x400000,",
        tests=(_TEST_E8M0 + "test_ovf_4_golden_exponents",),
    ),
    Mutation(
        name="mx_even_tie_down",
        fault="A maximum of exactly 1.75 * 2^n keeps the lower power of two.",
        path=_E8M0,
        old="ScaleRule.EVEN: 0x200000,",
        new="ScaleRule.EVEN: 0x1FFFFF,",
        tests=(_TEST_E8M0 + "test_ovf_4_golden_exponents",),
    ),
    Mutation(
        name="mx_rceil_at_its_threshold",
        fault="amax = 6 * 2^e exactly takes e + 1.",
        path=_E8M0,
        old="ScaleRule.RCEIL: 0x7FFFFF - 0x400000,",
        new="ScaleRule.RCEIL: 0x800000 - 0x400000,",
        tests=(_TEST_E8M0 + "test_ovf_4_golden_exponents",),
    ),
    Mutation(
        name="mx_ceil_at_powers_of_two",
        fault="A maximum that is a power of two takes the next one.",
        path=_E8M0,
        old="ScaleRule.CEIL: 0x7FFFFF,",
        new="ScaleRule.CEIL: 0x800000,",
        tests=(_TEST_E8M0 + "test_ovf_4_golden_exponents",),
    ),
    Mutation(
        name="mx_exponent_of_4_forgotten",
        fault="The largest exponent of E2M1 is taken to be 0: codes use a quarter of their range.",
        path=_E8M0,
        old="_LARGEST_E2M1_EXPONENT = 2",
        new="_LARGEST_E2M1_EXPONENT = 0",
        tests=(_TEST_E8M0 + "test_ovf_4_golden_exponents",),
    ),
    Mutation(
        name="mx_scale_below_the_range_wraps",
        fault="Exponents below -127 are not clamped.",
        path=_E8M0,
        old=".clamp_(0, (_MAX_BYTE + 1 << FRACTION_BITS) - 1)",
        new=".clamp_(max=(_MAX_BYTE + 1 << FRACTION_BITS) - 1)",
        tests=(_TEST_E8M0 + "test_ovf_6_the_ends_of_the_range_are_numbers",),
    ),
    Mutation(
        name="mx_byte_0_decodes_to_0",
        fault="2^-127 is flushed, as hardware that drops subnormals does.",
        path=_E8M0,
        old="return _VALUES.on(byte.device)[byte.to(torch.int32)]",
        new="values = _VALUES.on(byte.device)\n    return (values * (values >= 2.0**-126))[byte.to(torch.int32)]",
        tests=(_TEST_E8M0 + "test_all_bytes_decode_to_the_table",),
    ),
)

FOUR_OVER_SIX = (
    Mutation(
        name="four_over_six_ties_to_4",
        fault="Equal errors take amax / 4.",
        path=_SELECTION,
        old="is_better = _error(magnitude, four, outer, scheme) < _error(magnitude, six, outer, scheme)",
        new="is_better = _error(magnitude, four, outer, scheme) <= _error(magnitude, six, outer, scheme)",
        tests=(_TEST_SELECTION + "test_equal_errors_take_six",),
    ),
    Mutation(
        name="four_over_six_under_448",
        fault="The outer scale leaves no room for a scale 1.5 times larger.",
        path="src/tracefp4/formats/schemes.py",
        old="FOUR_OVER_SIX_MAX = 256.0",
        new="FOUR_OVER_SIX_MAX = 448.0",
        tests=(_TEST_SELECTION + "test_the_outer_scale_leaves_room_for_four",),
    ),
    Mutation(
        name="four_over_six_judged_on_raw_scales",
        fault="Errors are measured under the scales before they are rounded to E4M3.",
        path=_SELECTION,
        old="is_better = _error(magnitude, four, outer, scheme) < _error(magnitude, six, outer, scheme)",
        new="""blocks = magnitude.unflatten(-1, (-1, scheme.block_size))
    errors = []
    for target in (4.0, 6.0):
        decode_scale = (amax / target + 1e-45).unsqueeze(-1)
        gaps = (round_magnitude_(blocks / decode_scale)[1] * decode_scale - blocks).abs()
        pick = {Candidates.MSE: gaps.square().sum(-1), Candidates.MAE: gaps.sum(-1), Candidates.ABSMAX: gaps.amax(-1)}
        errors.append(pick[scheme.candidates])
    is_better = errors[0] < errors[1]""",
        tests=(_TEST_SELECTION + "test_the_better_scale_wins_by_exact_arithmetic",),
    ),
    Mutation(
        name="four_over_six_absolute_for_squared",
        fault="MSE sums absolute errors.",
        path=_SELECTION,
        old="terms = difference.square_() if scheme.candidates is Candidates.MSE else difference.abs_()",
        new="terms = difference.abs_()",
        tests=(_TEST_SELECTION + "test_the_better_scale_wins_by_exact_arithmetic[MSE]",),
    ),
    Mutation(
        name="four_over_six_signed_errors_cancel",
        fault="MAE sums signed errors.",
        path=_SELECTION,
        old="terms = difference.square_() if scheme.candidates is Candidates.MSE else difference.abs_()",
        new="terms = difference.square_() if scheme.candidates is Candidates.MSE else difference",
        tests=(_TEST_SELECTION + "test_the_better_scale_wins_by_exact_arithmetic[MAE]",),
    ),
    Mutation(
        name="four_over_six_largest_signed_error",
        fault="ABSMAX looks at errors upwards only.",
        path=_SELECTION,
        old="return difference.abs_().amax(-1)",
        new="return difference.amax(-1)",
        tests=(_TEST_SELECTION + "test_the_better_scale_wins_by_exact_arithmetic[ABSMAX]",),
    ),
    Mutation(
        name="four_over_six_errors_in_units_of_the_scale",
        fault="Errors of codes are compared, although the scales differ.",
        path=_SELECTION,
        old="    difference = values.sub_(magnitude.unflatten(-1, (-1, scheme.block_size)))",
        new="    difference = values.sub_(magnitude.unflatten(-1, (-1, scheme.block_size)))\n"
        "    difference /= decode_scales(block_scales, outer, scheme).unsqueeze(-1) + 1e-45",
        tests=(_TEST_SELECTION + "test_the_better_scale_wins_by_exact_arithmetic",),
    ),
    Mutation(
        name="four_over_six_with_the_wrong_candidate",
        fault="The worse scale is taken.",
        path=_SELECTION,
        old="return torch.where(is_better, four, six)",
        new="return torch.where(is_better, six, four)",
        tests=(_TEST_SELECTION + "test_four_wins_where_five_would_fall_between_codes",),
    ),
)

SIGNS = (
    Mutation(
        name="sign_of_minus_zero_not_kept",
        fault="The rule that keeps signs drops that of -0.0.",
        path=_SELECTION,
        old="if sign is Sign.KEPT:",
        new="if sign is not Sign.KEPT:",
        tests=(_TEST_SELECTION + "test_rnd_6_signs_of_zeros_by_rule",),
    ),
    Mutation(
        name="sign_of_not_positive_only_for_minus_zero",
        fault="+0.0 keeps its sign under the rule x <= 0.",
        path=_SELECTION,
        old="torch.where(x == 0, -0.0, x)",
        new="x",
        tests=(_TEST_SELECTION + "test_rnd_6_signs_of_zeros_by_rule",),
    ),
)

MUTATIONS = (*ORDERS, *MXFP4, *FOUR_OVER_SIX, *SIGNS)
