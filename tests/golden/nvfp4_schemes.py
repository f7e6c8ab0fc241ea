"""NVFP4 bytes of every scheme by hand: what a scheme does with ties, zeros, tiny and small blocks, and which of two
scales it takes. Blocks are given as their leading values, the rest of the 16 is 0; so are codes.

Sources: the E2M1 and E4M3 tables of the OCP specifications (spec_e2m1.py, spec_e4m3.py); floors and signs as read in
torchao 0.18, nvidia-modelopt 0.47, compressed-tensors 0.20.1, vLLM 0.32, transformer-engine 2.20.2, fouroversix 1.0.5;
Cook et al., "Four Over Six", arXiv 2512.02010. Block 0 holds 6 * scale_max, so that the outer scale is neutral (k = 0,
g = G = 1, or A itself) and the remaining bytes follow from the block alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """One row of blocks and its bytes under one scheme."""

    scheme: str
    name: str
    blocks: list[list[float]]
    outer: float
    """As stored: k, g, G or A."""
    block_scales: str
    """Hexadecimal bytes, one per block."""
    codes: list[list[int]]
    exponent: int = 0
    """Given to static schemes."""


_TIES = [
    6.0,
    0.25,
    0.75,
    1.25,
    1.75,
    2.5,
    3.5,
    5.0,
    -0.25,
    -0.75,
    -1.25,
    -1.75,
    -2.5,
    -3.5,
    -5.0,
    0.2500000298023224,
]
_RULES = [
    [2688.0],
    _TIES,  # scale 1: the values reach the grid untouched
    [0.0, -0.0],
    [6 * 2.0**-11, 3 * 2.0**-11],  # 2^-11 lies below half of the smallest scale, 2^-9: it rounds to byte 0
    [6 * 2.0**-8, -3 * 2.0**-8],  # 2^-8 is byte 2
    [6.0, -0.0, -0.1, 0.1],
    [90.0, 18.75, 37.5, -18.75],  # scale 15 (0x57): ties 1.25, 2.5, -1.25
]
_EVEN = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 1]
_DIVIDED = [7, 2, 4, 10]
_MULTIPLIED = [7, 3, 5, 11]  # 18.75 * fl(1/15) = 1.2500001, 37.5 * fl(1/15) = 2.5000002
_KEPT, _ORDERED = ([0, 8], [7, 8, 8, 0]), ([0, 0], [7, 0, 8, 0])
_TO_2_9 = [3, 2]  # 6 * 2^-11 / 2^-9 = 1.5; 0.75 is a tie: 1
_FLUSHED = [0, 0]  # scale 0; or 6 * 2^-11 / 2^-3 = 0.023
_SMALL = [7, 13]  # divided by 2^-8: 6, -3
_RAISED = [3, 10]  # divided by 2^-6: 1.5; -0.75 is a tie: -1
# outer as stored, zero byte, tiny byte and codes, small byte and codes, signs, codes of the last block
_OURS = (0, "00", "01", _TO_2_9, "02", _SMALL, _KEPT, _DIVIDED)
_FP32 = (1.0, *_OURS[1:])
_VLLM = (1.0, "00", "00", _FLUSHED, "02", _SMALL, _ORDERED, _MULTIPLIED)
_A = (2688.0, *_VLLM[1:])
_OF_SCHEME = {
    "NVFP4_ROW_POW2": _OURS,
    "NVFP4_TENSOR_POW2": _OURS,
    "NVFP4_STATIC_POW2": _OURS,
    "NVFP4_KV": _OURS,
    "NVFP4_ROW_FP32": _FP32,
    "NVFP4_TENSOR_FP32": _FP32,
    "NVFP4_MODELOPT": (1.0, "38", "01", _TO_2_9, "02", _SMALL, _ORDERED, _DIVIDED),
    "NVFP4_TORCHAO": (1.0, "08", "08", _FLUSHED, "08", _RAISED, _KEPT, _MULTIPLIED),
    "NVFP4_COMPRESSED_TENSORS": (1.0, "20", "20", _FLUSHED, "02", _SMALL, _ORDERED, _DIVIDED),
    "NVFP4_VLLM": _VLLM,
    "NVFP4_STATIC_VLLM": _VLLM,
    "NVFP4_TRANSFORMER_ENGINE": _A,
    "NVFP4_ROW_TRANSFORMER_ENGINE": _A,
    "NVFP4_FOUROVERSIX": _A,
}


def _rules(scheme: str) -> Golden:
    outer, zero, tiny, tiny_codes, small, small_codes, (zeros, signs), last = _OF_SCHEME[scheme]
    return Golden(
        scheme=scheme,
        name="zer_und_rnd",
        blocks=_RULES,
        outer=outer,
        block_scales=f"7E 38 {zero} {tiny} {small} 38 57",
        codes=[[7], _EVEN, zeros, tiny_codes, small_codes, signs, last],
    )


def _tie(scheme: str, outer: float, byte: str, code: int, exponent: int = 0) -> Golden:
    """[6, 0.75]: 0.75 is a tie (code 2) in real arithmetic; code 1 where a product falls below it."""
    return Golden(
        scheme=scheme,
        name="rnd_3_order_of_operations",
        blocks=[[6.0, 0.75]],
        outer=outer,
        block_scales=byte,
        codes=[[7, code]],
        exponent=exponent,
    )


_G = 0.0022321429569274187  # fl(6 / 2688), a little above 1 / 448
_RND_3 = [
    # k = -8 (2688 / 256 = 10.5 >= 6); 1 * 256 is byte 0x78
    _tie("NVFP4_ROW_POW2", -8, "78", 2),
    _tie("NVFP4_TENSOR_POW2", -8, "78", 2),
    _tie("NVFP4_STATIC_POW2", -8, "78", 2, exponent=-8),
    _tie("NVFP4_KV", -8, "78", 2, exponent=-8),
    _tie("NVFP4_STATIC_VLLM", 256.0, "78", 2, exponent=-8),
    # 448 * g rounds to 1
    _tie("NVFP4_ROW_FP32", _G, "7E", 2),
    _tie("NVFP4_TENSOR_FP32", _G, "7E", 2),
    _tie("NVFP4_MODELOPT", _G, "7E", 2),
    # (1 / g) / 448 is a little below 1: 0.75 * that is 0.74999994
    _tie("NVFP4_TORCHAO", _G, "7E", 1),
    # G = 448 exactly
    _tie("NVFP4_COMPRESSED_TENSORS", 448.0, "7E", 2),
    _tie("NVFP4_VLLM", 448.0, "7E", 2),
    _tie("NVFP4_TRANSFORMER_ENGINE", 6.0, "7E", 2),
    _tie("NVFP4_ROW_TRANSFORMER_ENGINE", 6.0, "7E", 2),
    _tie("NVFP4_FOUROVERSIX", 6.0, "7E", 2),
]

# Block maxima of 24: scale 4 (0x48) makes them 6, scale 6 (0x4C) makes them 4. Errors in units of 1.
_CHOICES = {
    # both hold 24: a tie, six
    "tie": ([24.0], dict.fromkeys(("MSE", "MAE", "ABSMAX"), "48"), {"48": [7], "4C": [6]}),
    # 20 / 4 = 5, a tie to 4: 16, off by 4; 20 / 6 to 3: 18, off by 2
    "four": ([24.0, 20.0], dict.fromkeys(("MSE", "MAE", "ABSMAX"), "4C"), {"48": [7, 6], "4C": [6, 5]}),
    # six: 2.5 to 2, off by 2: 4, 2, 2. four: 10 to 9, 2 to 3 (.33 to .5) twice: squares 3, sum 3, largest 1
    "mae_differs": (
        [24.0, 10.0, 2.0, 2.0],
        {"MSE": "4C", "MAE": "48", "ABSMAX": "4C"},
        {"48": [7, 4, 1, 1], "4C": [6, 3, 1, 1]},
    ),
    # six: 5 to 16 (4), 3.75 to 16 (1) twice: squares 18, largest 4. four: 20 to 18 (2), 15 to 12 or 18 (2.5, a tie
    # to 2: 3) twice: squares 22, largest 3
    "absmax_differs": (
        [24.0, 20.0, 15.0, 15.0],
        {"MSE": "48", "MAE": "48", "ABSMAX": "4C"},
        {"48": [7, 6, 6, 6], "4C": [6, 5, 4, 4]},
    ),
}


def _four_over_six(scheme: str, rule: str, outer: float, scale_max: float) -> Golden:
    chosen = [(block, bytes_[rule], codes[bytes_[rule]]) for block, bytes_, codes in _CHOICES.values()]
    first = "78" if scale_max == 256 else "7E"  # 256, or 448: under both the candidate for 4 gains nothing
    return Golden(
        scheme=f"{scheme}_4OVER6_{rule}",
        name="four_over_six",
        blocks=[[6 * scale_max], *(block for block, _, _ in chosen)],
        outer=outer,
        block_scales=" ".join([first, *(byte for _, byte, _ in chosen)]),
        codes=[[7], *(codes for _, _, codes in chosen)],
    )


ERROR_SUMS = {
    "MSE": [
        [35, -9, 19, 36, -96, 32, -10, -39, 21, -42, -49, 21, 3, 71, 93, 18],
        [55, 53, -52, 68, 81, -71, -37, 30, 17, 36, 25, -28, -14, 53, -67, -59],
    ],
    "MAE": [
        [-91, -41, 46, -25, -50, 45, 70, 55, 19, -77, -69, -33, 6, -12, -8, 96],
        [71, 18, 7, -79, -45, -43, 0, 17, 48, -58, 22, -96, -88, -5, -35, -38],
    ],
}
"""Two blocks per rule, in eighths, whose two candidates have errors so near that the order of adding decides: one parts
TREE from FOLDED, the other SEQUENTIAL from both. Found by search; about one block in 10^5 is like them."""
ERROR_SUM_MAXIMUM = 19.7
"""The tensor's maximum, in a block of its own, under which they do so; kind "amax", largest scale 256."""

_MAX_256 = [
    ("NVFP4_ROW_POW2", 0),
    ("NVFP4_TENSOR_POW2", 0),
    ("NVFP4_ROW_FP32", 1.0),
    ("NVFP4_TENSOR_FP32", 1.0),
    ("NVFP4_FOUROVERSIX", 1536.0),
]

CASES = [
    *(_rules(scheme) for scheme in _OF_SCHEME),
    *_RND_3,
    *(
        _four_over_six(scheme, rule, outer, 256.0)
        for scheme, outer in _MAX_256
        for rule in ("MSE", "MAE", "ABSMAX")
    ),
    *(_four_over_six("NVFP4_TRANSFORMER_ENGINE", rule, 2688.0, 448.0) for rule in ("MSE", "MAE")),
    *(_four_over_six("NVFP4_TRANSFORMER_ENGINE_256", rule, 1536.0, 256.0) for rule in ("MSE", "MAE")),
]
