"""Every scheme as a named constant: ours, and those that other libraries implement, each under its own name.

Ours share one set of rules: arithmetic in float32, one division by the stored scales, an all-zero block stores
scale byte 0, a tiny one 2^-9, zeros keep their sign. The others follow their library byte for byte in operation
order, floors and signs; a block with NaN or Inf, an all-zero tensor and an outer scale outside float32 follow our
rules in all of them, because there the libraries give garbage. `docs/schemes.md` lists them side by side. This
module never touches a tensor.
"""

import difflib
from dataclasses import replace

from tracefp4.errors import ConfigError
from tracefp4.formats.block import MXFP4, NVFP4
from tracefp4.formats.order import Candidates, ErrorSum, Order, ScaleRule, Sign, Tie
from tracefp4.formats.scheme import Scheme

FOUR_OVER_SIX_MAX = 256.0
"""Largest block scale of amax / 6 in four-over-six schemes: 1.5 times it is 384, still an E4M3 number."""

NVFP4_ROW_POW2 = Scheme(name="NVFP4_ROW_POW2", block_format=NVFP4, outer="row", order=Order.POW2)
"""Default for activations: one power of two per row, so that a row's bytes never depend on another row."""
NVFP4_TENSOR_POW2 = Scheme(name="NVFP4_TENSOR_POW2", block_format=NVFP4, outer="tensor", order=Order.POW2)
"""Default for weights: one power of two per expert matrix; gate and up are one matrix and share it."""
NVFP4_STATIC_POW2 = Scheme(name="NVFP4_STATIC_POW2", block_format=NVFP4, outer="static", order=Order.POW2)
"""Activations under one calibrated power of two per layer, as checkpoint formats store it."""
NVFP4_KV = replace(NVFP4_STATIC_POW2, name="NVFP4_KV")
"""Default for keys and values: one calibrated power of two per layer and tensor kind."""
NVFP4_ROW_FP32 = Scheme(name="NVFP4_ROW_FP32", block_format=NVFP4, outer="row", order=Order.MODELOPT)
"""A float32 multiplier per row: per-token mode. Dequantized values are not bf16 numbers."""
NVFP4_TENSOR_FP32 = Scheme(name="NVFP4_TENSOR_FP32", block_format=NVFP4, outer="tensor", order=Order.MODELOPT)
"""A float32 multiplier per matrix, amax / 2688. Dequantized values are not bf16 numbers."""

MXFP4_FLOOR = Scheme(
    name="MXFP4_FLOOR", block_format=MXFP4, outer="none", order=Order.MX, scale_rule=ScaleRule.FLOOR
)
"""The rule of the OCP specification, and torchao's default."""
MXFP4_EVEN = replace(MXFP4_FLOOR, name="MXFP4_EVEN", scale_rule=ScaleRule.EVEN)
"""compressed-tensors and vLLM."""
MXFP4_RCEIL = replace(MXFP4_FLOOR, name="MXFP4_RCEIL", scale_rule=ScaleRule.RCEIL)
"""Nothing saturates; ModelOpt, FlashInfer and Transformer Engine use this exponent."""
MXFP4_CEIL = replace(MXFP4_FLOOR, name="MXFP4_CEIL", scale_rule=ScaleRule.CEIL)
"""An option of torchao."""

NVFP4_MODELOPT = replace(NVFP4_TENSOR_FP32, name="NVFP4_MODELOPT", zero_byte=0x38, sign=Sign.ORDERED)
"""nvidia-modelopt 0.47: an all-zero block stores 1.0."""
NVFP4_TORCHAO = replace(
    NVFP4_TENSOR_FP32,
    name="NVFP4_TORCHAO",
    order=Order.TORCHAO,
    zero_byte=0x08,
    underflow_byte=0x08,
    least_byte=0x08,
)
"""torchao 0.18, two levels: no scale below 2^-6, the smallest normal E4M3 number."""
NVFP4_COMPRESSED_TENSORS = replace(
    NVFP4_TENSOR_FP32,
    name="NVFP4_COMPRESSED_TENSORS",
    order=Order.COMPRESSED_TENSORS,
    zero_byte=0x20,
    underflow_byte=0x20,
    sign=Sign.ORDERED,
)
"""compressed-tensors 0.20 on float32 inputs: a scale that would be 0 becomes 0.125."""
NVFP4_VLLM = replace(
    NVFP4_TENSOR_FP32, name="NVFP4_VLLM", order=Order.VLLM, underflow_byte=0x00, sign=Sign.ORDERED
)
"""vLLM's emulation (0.32) of its kernels, outer scale over the tensor."""
NVFP4_STATIC_VLLM = replace(NVFP4_VLLM, name="NVFP4_STATIC_VLLM", outer="static")
"""The same under a calibrated power of two: what vLLM makes of the activations of an exported checkpoint."""
NVFP4_TRANSFORMER_ENGINE = replace(
    NVFP4_VLLM, name="NVFP4_TRANSFORMER_ENGINE", order=Order.TRANSFORMER_ENGINE
)
"""Transformer Engine 2.20 (its torch reference)."""
NVFP4_ROW_TRANSFORMER_ENGINE = replace(
    NVFP4_TRANSFORMER_ENGINE, name="NVFP4_ROW_TRANSFORMER_ENGINE", outer="row"
)
"""Transformer Engine's row-scaled mode."""
NVFP4_FOUROVERSIX = replace(NVFP4_VLLM, name="NVFP4_FOUROVERSIX", order=Order.FOUROVERSIX)
"""fouroversix 1.0.5, its rule "static_6"; the four-over-six rules follow."""
MXFP4_COMPRESSED_TENSORS = replace(MXFP4_EVEN, name="MXFP4_COMPRESSED_TENSORS", sign=Sign.ORDERED)
"""compressed-tensors 0.20."""
MXFP4_FOUROVERSIX = replace(MXFP4_RCEIL, name="MXFP4_FOUROVERSIX", sign=Sign.ORDERED)
"""fouroversix 1.0.5."""
MXFP4_MODELOPT = replace(MXFP4_RCEIL, name="MXFP4_MODELOPT", tie=Tie.TOWARD_ZERO, sign=Sign.NOT_POSITIVE)
"""nvidia-modelopt 0.47: every tie goes down, and zeros store code 8."""


def _four_over_six(scheme: Scheme, *rules: Candidates, scale_max: float = FOUR_OVER_SIX_MAX) -> list[Scheme]:
    """The four-over-six variants of a scheme, named after it."""
    return [
        replace(scheme, name=f"{scheme.name}_4OVER6_{rule.name}", candidates=rule, scale_max=scale_max)
        for rule in rules
    ]


_NAMED = (
    NVFP4_ROW_POW2,
    NVFP4_TENSOR_POW2,
    NVFP4_STATIC_POW2,
    NVFP4_KV,
    NVFP4_ROW_FP32,
    NVFP4_TENSOR_FP32,
    MXFP4_FLOOR,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    MXFP4_CEIL,
    NVFP4_MODELOPT,
    NVFP4_TORCHAO,
    NVFP4_COMPRESSED_TENSORS,
    NVFP4_VLLM,
    NVFP4_STATIC_VLLM,
    NVFP4_TRANSFORMER_ENGINE,
    NVFP4_ROW_TRANSFORMER_ENGINE,
    NVFP4_FOUROVERSIX,
    MXFP4_COMPRESSED_TENSORS,
    MXFP4_FOUROVERSIX,
    MXFP4_MODELOPT,
)
_ALL_RULES = (Candidates.MSE, Candidates.MAE, Candidates.ABSMAX)
# In this mode Transformer Engine finds its base scale as fouroversix does, under 448 unless told otherwise.
_ENGINE_4OVER6 = replace(NVFP4_TRANSFORMER_ENGINE, order=Order.FOUROVERSIX, error_sum=ErrorSum.SEQUENTIAL)
_FOUR_OVER_SIX = (
    *_four_over_six(NVFP4_ROW_POW2, *_ALL_RULES),
    *_four_over_six(NVFP4_TENSOR_POW2, *_ALL_RULES),
    *_four_over_six(NVFP4_ROW_FP32, *_ALL_RULES),
    *_four_over_six(NVFP4_TENSOR_FP32, *_ALL_RULES),
    *_four_over_six(replace(NVFP4_FOUROVERSIX, error_sum=ErrorSum.FOLDED), *_ALL_RULES),
    *_four_over_six(_ENGINE_4OVER6, Candidates.MSE, Candidates.MAE, scale_max=448.0),
    *_four_over_six(
        replace(_ENGINE_4OVER6, name="NVFP4_TRANSFORMER_ENGINE_256"), Candidates.MSE, Candidates.MAE
    ),
)

# Names that an error shows.
_NUM_NEAR = 5

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (*_NAMED, *_FOUR_OVER_SIX)}
"""Every scheme by name."""


def scheme_by_name(name: str) -> Scheme:
    """Return the scheme with this name.

    Args:
        name: One of the keys of SCHEMES, exactly.

    Returns:
        The scheme constant.

    Raises:
        ConfigError: When no scheme has the name; the message holds the nearest names.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    wanted = str(name).upper()
    near = difflib.get_close_matches(wanted, SCHEMES, n=_NUM_NEAR, cutoff=0.0)
    # half a name means its whole family, whose first names are the usual ones
    near = [known for known in SCHEMES if wanted and known.startswith(wanted)][:_NUM_NEAR] or near
    raise ConfigError(
        f"Unknown scheme {name!r}. There are {len(SCHEMES)}; near: {', '.join(near)}. docs/schemes.md lists them all. "
        "Use one of these names."
    )
