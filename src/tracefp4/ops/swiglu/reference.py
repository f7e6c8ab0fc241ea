"""The definition of swiglu: silu in float32, rounded where bf16 is stored."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from tracefp4.formats.scheme import Scheme
from tracefp4.ops.nearest import nearest_rows
from tracefp4.ops.swiglu.operands import Gated


def swiglu_reference(gate_up: Tensor, rule: tuple[Scheme, int | None] | None) -> Gated:
    """Gate checked rows; see `swiglu`."""
    gate, up = gate_up.detach().chunk(2, dim=-1)
    values = silu(gate.to(torch.float32)).to(torch.bfloat16) * up
    return Gated(values, None if rule is None else nearest_rows(values, *rule))


def outside(values: Tensor, gate_up: Tensor) -> Tensor:
    """Say which values no silu gives that is within 2^-20 of the exact one, bool [P, I]; below -80 also within 2^-121.

    Exponentials differ in their last bits between libraries, which shows where a silu lies next to the middle between
    two bf16 numbers, and float32 ones overflow where the silu is smaller than 2^-121.
    """
    gate, up = gate_up.detach().chunk(2, dim=-1)
    exact = silu(gate.to(torch.float64))
    error = exact.abs().nan_to_num(0.0, 0.0) * 2.0**-20 + (gate < -80.0) * 2.0**-121
    one, other = ((exact + by).to(torch.bfloat16) * up for by in (-error, error))
    is_within = (values >= torch.minimum(one, other)) & (values <= torch.maximum(one, other))
    return ~(is_within | (values.isnan() & one.isnan()))
