"""The fewest bytes and operations of every kernel that is measured: arithmetic on sizes, no tensor is touched.

Every operand counts once, read or written; weights count for the experts that are in use. FP4 takes half a byte a
value and one scale byte for each block.
"""

from typing import NamedTuple

from tracefp4.patching.shapes import ModelShape

BF16 = 2.0
NVFP4 = 0.5 + 1 / 16
MXFP4 = 0.5 + 1 / 32


class Traffic(NamedTuple):
    """What a call must do."""

    bytes: float
    """Read and written."""
    flops: float = 0.0
    """Multiplications and additions of matrix products."""


def elementwise(count: int, *bytes_per_element: float) -> Traffic:
    """Return the traffic of an op over `count` elements whose operands take so many bytes an element."""
    return Traffic(count * sum(bytes_per_element))


def expert_layer(shape: ModelShape, *, num_tokens: int, distinct: int, weight_bytes: float) -> Traffic:
    """Return the traffic of all routed experts of a layer: weights in use, x in, y out; products of every pair.

    Args:
        shape: The model.
        num_tokens: T.
        distinct: Experts in use.
        weight_bytes: Of one weight.
    """
    weights = 3 * shape.hidden * shape.moe_inter
    activations = 2 * BF16 * num_tokens * shape.hidden
    return Traffic(distinct * weights * weight_bytes + activations, 2.0 * weights * num_tokens * shape.top_k)


def decode_attention(shape: ModelShape, *, num_tokens: int, value_bytes: float) -> Traffic:
    """Return the traffic of one decode step of one layer over `num_tokens` cached tokens of all sequences together."""
    kv = 2 * shape.kv_heads * shape.head_dim
    return Traffic(num_tokens * kv * value_bytes, 4.0 * num_tokens * shape.q_heads * shape.head_dim)


def append(shape: ModelShape, *, num_tokens: int, value_bytes: float) -> Traffic:
    """Return the traffic of storing K and V of new tokens, which are read in bf16."""
    return elementwise(num_tokens * 2 * shape.kv_heads * shape.head_dim, BF16, value_bytes)


def delta_step(shape: ModelShape, *, num_seqs: int, state_bytes: float) -> Traffic:
    """Return the traffic of a decode step of a gated delta layer: states read and written, projections in, output."""
    heads, dim = shape.delta_v_heads, shape.delta_dim
    width = (2 * shape.delta_qk_heads + heads) * dim
    states = 2 * (heads * dim * dim * state_bytes + BF16 * (shape.delta_conv - 1) * width)
    rows = BF16 * (width + 2 * heads * dim + 2 * heads)
    return Traffic(num_seqs * (states + rows) + BF16 * shape.delta_conv * width)


def head(shape: ModelShape, *, num_rows: int) -> Traffic:
    """Return the traffic of the head of a language model: its matrix once, the hidden states once."""
    return Traffic(
        BF16 * shape.hidden * (shape.vocab + num_rows), 2.0 * num_rows * shape.vocab * shape.hidden
    )


def refit(shape: ModelShape, *, passes: int = 1) -> Traffic:
    """Return the traffic of quantizing the experts of one layer, their weights read `passes` times."""
    return elementwise(shape.experts * 3 * shape.hidden * shape.moe_inter, passes * BF16, NVFP4)
