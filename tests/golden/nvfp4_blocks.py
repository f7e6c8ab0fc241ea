"""Named NVFP4 blocks under the power-of-two schemes -> exact bytes, derived by hand as written beside each
case.

x is given as its non-zero prefix per block of 16. `exponent` is the outer k: smallest k with amax <= 2688 *
2^k.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """One row of blocks and its bytes."""

    name: str
    """Test id; starts with the case it guards."""
    blocks: list[list[float]]
    """Leading values of each block of 16; the rest is 0."""
    exponent: int
    """Outer exponent, found (row scheme) or given (static scheme)."""
    block_scales: list[int]
    """E4M3 byte per block."""
    codes: list[list[int]]
    """Leading codes of each block; the rest is 0."""
    values: list[list[float]]
    """Leading dequantized values of each block."""
    is_static: bool = False
    """True: quantize with NVFP4_KV at the given exponent."""
    packed: list[str] = field(default_factory=list)
    """Hexadecimal packed bytes per block, where worth pinning."""


_TIES = [
    6,
    0.25,
    0.75,
    1.25,
    1.75,
    2.5,
    3.5,
    5,
    -0.25,
    -0.75,
    -1.25,
    -1.75,
    -2.5,
    -3.5,
    -5,
    0.2500000298023224,
]

CASES = [
    Golden(
        name="zer_1_zero_block_beside_a_small_one",
        # amax 3: 3 / 2688 = 2^-9.8, so k = -9 (k = -10 holds only 2.625). (3 / 6) * 2^9 = 256 = byte 0x78.
        blocks=[[], [3.0, 1.0, 0.5]],
        exponent=-9,
        block_scales=[0x00, 0x78],
        codes=[[], [7, 4, 2]],
        values=[[], [3.0, 1.0, 0.5]],
    ),
    Golden(
        name="zer_2_all_zero_row",
        blocks=[[], []],
        exponent=0,
        block_scales=[0, 0],
        codes=[[], []],
        values=[[], []],
    ),
    Golden(
        name="zer_3_tiny_maximum",
        # k clamps to -110. 2^-120 / 6 * 2^110 rounds to 0: floor 2^-9. 2^-120 / 2^-119 = 0.5.
        blocks=[[2.0**-120]],
        exponent=-110,
        block_scales=[0x01],
        codes=[[1]],
        values=[[2.0**-120]],
    ),
    Golden(
        name="ovf_1_static_scale_too_small",
        # k = 0 given; 5376 / 6 = 896 clamps to 448; 5376 / 448 = 12 saturates at 6.
        blocks=[[5376.0, 2688.0, 1344.0, 672.0]],
        exponent=0,
        block_scales=[0x7E],
        codes=[[7, 7, 5, 3]],
        values=[[2688.0, 2688.0, 1344.0, 672.0]],
        is_static=True,
    ),
    Golden(
        name="ovf_row_beyond_the_largest_exponent",
        # 3e38 / 2688 = 2^116.4: k clamps to 116, the block scale to 448, the code to 6.
        blocks=[[3e38]],
        exponent=116,
        block_scales=[0x7E],
        codes=[[7]],
        values=[[2688.0 * 2.0**116]],
    ),
    Golden(
        name="und_1_block_scale_below_the_smallest_subnormal",
        # k = 0. 2^-11 < 2^-10 would round to 0: floor 2^-9. 6 * 2^-11 / 2^-9 = 1.5; 3 * 2^-11 / 2^-9 =
        # 0.75, tie to 1.
        blocks=[[2688.0], [6 * 2.0**-11, 3 * 2.0**-11]],
        exponent=0,
        block_scales=[0x7E, 0x01],
        codes=[[7], [3, 2]],
        values=[[2688.0], [0.0029296875, 0.001953125]],
    ),
    Golden(
        name="und_tie_of_the_smallest_scale",
        # 6 * 2^-10 / 6 = 2^-10 is the tie between 0 and 2^-9: even, 0, hence the floor; 6 * 2^-10 / 2^-9 = 3.
        blocks=[[2688.0], [6 * 2.0**-10], [9 * 2.0**-10]],
        exponent=0,
        block_scales=[0x7E, 0x01, 0x01],
        codes=[[7], [5], [6]],  # 4.5 lies nearer to 4 than to 6
        values=[[2688.0], [3 * 2.0**-9], [4 * 2.0**-9]],
    ),
    Golden(
        name="rnd_1_ties_to_even",
        blocks=[[2688.0], [float(v) for v in _TIES]],
        exponent=0,
        block_scales=[0x7E, 0x38],
        codes=[[7], [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 1]],
        values=[[2688.0], [6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, 0.5]],
        packed=["0700000000000000", "07224466a8caec1e"],
    ),
    Golden(
        name="rnd_3_division_not_reciprocal",
        # k = -8 (2688 / 256 = 10.5 >= 6); 1 * 256 = 0x78; s * 2^k = 1; 0.75 is a tie -> 1.0.
        blocks=[[6.0, 0.75]],
        exponent=-8,
        block_scales=[0x78],
        codes=[[7, 2]],
        values=[[6.0, 1.0]],
    ),
    Golden(
        name="rnd_3_tie_that_a_reciprocal_misses",
        # s = 15 (0x57): amax 90. 18.75 / 15 = 1.25 is a tie -> 1 (code 2); 37.5 / 15 = 2.5 -> 2 (code 4).
        # float32: 18.75 * (1 / 15) = 1.2500001 -> code 3; 37.5 * (1 / 15) = 2.5000002 -> code 5.
        blocks=[[2688.0], [90.0, 18.75, 37.5, -18.75]],
        exponent=0,
        block_scales=[0x7E, 0x57],
        codes=[[7], [7, 2, 4, 10]],
        values=[[2688.0], [90.0, 15.0, 30.0, -15.0]],
    ),
    Golden(
        name="rnd_6_negative_zero_is_kept",
        # s * 2^k = 1; -0.1 rounds to -0.
        blocks=[[6.0, -0.1, 0.1]],
        exponent=-8,
        block_scales=[0x78],
        codes=[[7, 8, 0]],
        values=[[6.0, -0.0, 0.0]],
    ),
    Golden(
        name="rnd_7_float32_input_is_not_rounded_to_bf16",
        # 1.2509765625 in float32 lies above the tie 1.25: code 3. In bf16 it would be 1.25: code 2.
        blocks=[[6.0, 1.2509765625, 1.25]],
        exponent=0,
        block_scales=[0x38],
        codes=[[7, 3, 2]],
        values=[[6.0, 1.5, 1.0]],
        is_static=True,
    ),
    Golden(
        name="exponent_at_its_boundary",
        # amax exactly 2688 * 2^3: k = 3 and the scale is 448.
        blocks=[[21504.0, -21504.0]],
        exponent=3,
        block_scales=[0x7E],
        codes=[[7, 15]],
        values=[[21504.0, -21504.0]],
    ),
    Golden(
        name="exponent_just_above_its_boundary",
        # The next float32 above 2688: k = 1; 448.00004 / 2 = 224.00002 -> 224 (0x76).
        blocks=[[2688.000244140625]],
        exponent=1,
        block_scales=[0x76],
        codes=[[7]],
        values=[[2688.0]],
    ),
]
