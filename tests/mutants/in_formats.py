"""Faults in the formats: element tables, rounding to the grid, packing, bf16."""

from tests.mutants.mutation import Mutation

_GRID = "src/tracefp4/formats/grid.py"
_ELEMENT = "src/tracefp4/formats/element.py"
_PACKING = "src/tracefp4/formats/packing.py"
_TEST_GRID = "tests/formats/test_grid.py::"
_TEST_ELEMENT = "tests/formats/test_element.py::"
_TEST_PACKING = "tests/formats/test_packing.py::"

ELEMENT = (
    Mutation(
        name="e2m1_table_without_its_subnormal",
        fault="Exponent field 0 is read as a normal number.",
        path=_ELEMENT,
        old="if exponent == 0 and self.has_subnormals:",
        new="if exponent < 0 and self.has_subnormals:",
        tests=(_TEST_ELEMENT + "test_rnd_5_e2m1_table_has_its_subnormal", _TEST_ELEMENT + "test_e4m3_values"),
    ),
    Mutation(
        name="e8m0_byte_0_is_zero",
        fault="The scale-only format is given subnormals.",
        path=_ELEMENT,
        old="return self.mantissa_bits > 0",
        new="return self.mantissa_bits >= 0",
        tests=(_TEST_ELEMENT + "test_ovf_6_e8m0_ends_of_its_range",),
    ),
    Mutation(
        name="e8m0_byte_255_is_a_number",
        fault="The NaN of E8M0 is read as 2^128.",
        path=_ELEMENT,
        old="is_signed=False,\n    has_nan=True,",
        new="is_signed=False,\n    has_nan=False,",
        tests=(_TEST_ELEMENT + "test_ovf_6_e8m0_byte_255_is_nan",),
    ),
    Mutation(
        name="e4m3_bias_of_the_fnuz_variant",
        fault="Bias 8 in place of 7: every scale is halved.",
        path=_ELEMENT,
        old="bias=7,",
        new="bias=8,",
        tests=(_TEST_ELEMENT + "test_e4m3_values",),
    ),
    Mutation(
        name="nvfp4_blocks_of_32",
        fault="NVFP4 takes the block size of MXFP4.",
        path="src/tracefp4/formats/block.py",
        old="block_size=16,",
        new="block_size=32,",
        tests=(_TEST_ELEMENT + "test_block_formats",),
    ),
)

GRID = (
    Mutation(
        name="e2m1_ties_away_from_zero",
        fault="Halfway values go to the larger magnitude.",
        path=_GRID,
        old="rounded = z + anchor",
        new="rounded = torch.nextafter(z, z + 1.0) + anchor",
        tests=(_TEST_GRID + "test_rnd_1_and_rnd_5_golden_roundings",),
    ),
    Mutation(
        name="e2m1_ties_toward_zero",
        fault="Halfway values go to the smaller magnitude.",
        path=_GRID,
        old="rounded = z + anchor",
        new="rounded = torch.nextafter(z, z - 1.0) + anchor",
        tests=(_TEST_GRID + "test_rnd_1_and_rnd_5_golden_roundings",),
    ),
    Mutation(
        name="e2m1_without_clamp_at_6",
        fault="Values above 6 reach codes that do not exist.",
        path=_GRID,
        old="z = magnitude.clamp_(max=6.0)",
        new="z = magnitude",
        tests=(_TEST_GRID + "test_rnd_1_and_rnd_5_golden_roundings",),
    ),
    Mutation(
        name="e2m1_step_of_the_next_binade",
        fault="Values just below 2 or 4 are rounded with the step that begins there.",
        path=_GRID,
        old="anchor = z * 4194300.0",
        new="anchor = z * 4194306.0",
        tests=(_TEST_GRID + "test_float32_numbers_around_every_boundary_round_exactly",),
    ),
    Mutation(
        name="e2m1_without_subnormal",
        fault="The step stays 1 below 2, so .5 and 1.5 are never produced.",
        path=_GRID,
        old="anchor.clamp_(min=4194304.0)",
        new="anchor.clamp_(min=8388608.0)",
        tests=(_TEST_GRID + "test_rnd_1_and_rnd_5_golden_roundings",),
    ),
    Mutation(
        name="e2m1_code_of_6",
        fault="The last piece of the map from magnitudes to codes is off by one.",
        path=_GRID,
        old="quarter = (doubled >> 2).add_(4)",
        new="quarter = (doubled >> 2).add_(3)",
        tests=(_TEST_GRID + "test_all_codes_decode_and_encode_to_themselves",),
    ),
    Mutation(
        name="e2m1_magnitude_of_code_7",
        fault="The last piece of the map from codes to magnitudes is off.",
        path=_GRID,
        old="fourfold = (code << 2).sub_(16)",
        new="fourfold = (code << 2).sub_(15)",
        tests=(_TEST_GRID + "test_all_codes_decode_and_encode_to_themselves",),
    ),
    Mutation(
        name="sign_of_zero_lost",
        fault="The sign is taken by comparison, so -0.0 loses it.",
        path=_GRID,
        old="return (x.view(torch.int32) >> 31).to(torch.int8)",
        new="return -(x < 0).to(torch.int8)",
        tests=(
            _TEST_GRID + "test_special_values_stay_inside_the_format",
            "tests/ops/test_quantize.py::test_rnd_6_signed_zeros",
        ),
    ),
    Mutation(
        name="sign_in_the_wrong_bit",
        fault="The sign lands in the top magnitude bit.",
        path=_GRID,
        old="magnitude_to_code(rounded).bitwise_or_(sign_of(z32).bitwise_and_(8))",
        new="magnitude_to_code(rounded).bitwise_or_(sign_of(z32).bitwise_and_(4))",
        tests=(_TEST_GRID + "test_rnd_1_and_rnd_5_golden_roundings",),
    ),
    Mutation(
        name="e2m1_nan_becomes_6",
        fault="NaN turns into the largest number.",
        path=_GRID,
        old="nan=0.0, posinf=6.0",
        new="nan=6.0, posinf=6.0",
        tests=(_TEST_GRID + "test_special_values_stay_inside_the_format",),
    ),
    Mutation(
        name="e4m3_without_clamp_at_448",
        fault="The cast sees values above 448, which some versions turn into NaN.",
        path=_GRID,
        old="clamped = x.to(torch.float32).clamp(min=-_E4M3_MAX, max=_E4M3_MAX)",
        new="clamped = x.to(torch.float32)",
        tests=(_TEST_GRID + "test_ovf_2_the_cast_never_sees_a_value_above_448",),
    ),
    Mutation(
        name="e4m3_subnormals_flushed_in_encoding",
        fault="Scales below 2^-6 become 0.",
        path=_GRID,
        old="return clamped.to(torch.float8_e4m3fn).view(torch.uint8)",
        new="return clamped.where(clamped.abs() >= 2.0**-6, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)",
        tests=(_TEST_GRID + "test_ovf_2_e4m3_casts_saturate",),
    ),
    Mutation(
        name="e4m3_subnormals_flushed_in_decoding",
        fault="Stored scales below 2^-6 read back as 0.",
        path=_GRID,
        old="return byte.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)",
        new="unit = byte.contiguous().view(torch.float8_e4m3fn).to(torch.float32)\n"
        "    return unit.where(unit.abs() >= 2.0**-6, 0.0).to(dtype)",
        tests=(_TEST_GRID + "test_all_e4m3_bytes_decode_to_the_table_and_encode_to_themselves",),
    ),
    Mutation(
        name="bracket_on_the_other_side",
        fault="The neighbour beyond the nearest codeword is taken for the other end of the bracket.",
        path=_GRID,
        old="towards = torch.sign(magnitude - rounded)",
        new="towards = torch.sign(rounded - magnitude)",
        tests=(_TEST_GRID + "test_bracket_holds_the_value_for_every_bf16_number",),
    ),
    Mutation(
        name="bf16_rounded_twice",
        fault="float64 goes to bf16 through float32.",
        path="src/tracefp4/formats/arithmetic.py",
        old="    if x.dtype == torch.float64:\n        return _round_bf16_float64(x)\n",
        new="",
        tests=("tests/formats/test_arithmetic.py::test_float64_rounds_once",),
    ),
)

PACKING = (
    Mutation(
        name="swap_nibbles_in_packing",
        fault="The even index goes into the high nibble.",
        path=_PACKING,
        old="(pair | pair >> 4)",
        new="(pair << 4 | pair >> 8)",
        tests=(_TEST_PACKING + "test_even_index_lies_in_the_low_nibble",),
    ),
    Mutation(
        name="swap_nibbles_in_unpacking",
        fault="The high nibble is read as the even index.",
        path=_PACKING,
        old="[[byte & 15, byte >> 4] for byte in range(256)]",
        new="[[byte >> 4, byte & 15] for byte in range(256)]",
        tests=(_TEST_PACKING + "test_all_pairs_of_codes_round_trip",),
    ),
    Mutation(
        name="bits_packed_backwards",
        fault="Value 0 goes into the top bit of its byte.",
        path=_PACKING,
        old="eight = _words(bits, torch.int64)",
        new="eight = _words(bits.unflatten(-1, (-1, 8)).flip(-1).flatten(-2), torch.int64)",
        tests=(_TEST_PACKING + "test_bit_i_of_byte_j_is_value_8j_plus_i",),
    ),
    Mutation(
        name="bits_unpacked_backwards",
        fault="The top bit of a byte is read as value 0.",
        path=_PACKING,
        old="[byte >> i & 1 for i in range(8)]",
        new="[byte >> i & 1 for i in range(7, -1, -1)]",
        tests=(_TEST_PACKING + "test_all_bytes_of_bits_round_trip",),
    ),
    Mutation(
        name="packing_ignores_strides",
        fault="A view is read as if its elements were neighbours in memory.",
        path=_PACKING,
        old="flat = tensor.contiguous().view(\n        -1\n    )",
        new="flat = tensor.as_strided(\n        (tensor.numel(),), (1,)\n    )",
        tests=(_TEST_PACKING + "test_shapes_and_strides",),
    ),
)

MUTATIONS = (*ELEMENT, *GRID, *PACKING)
