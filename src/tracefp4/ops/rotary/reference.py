"""The definition of rotary: the norm of a head (`ops/norms.py`) if asked for, then the rotation, rounded where bf16 is
stored."""

import torch
from torch import Tensor

from tracefp4.ops.norms import rms_normed
from tracefp4.ops.rotary.operands import Angles, HeadNorms


def rotary_reference(
    q: Tensor, k: Tensor, norms: HeadNorms | None, angles: Angles, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm and rotate checked heads; see `rotary`."""
    length = angles.cos.shape[0]
    is_known = (positions >= 0) & (positions < length)
    cos, sin = (table[positions.masked_fill(~is_known, 0)][:, None] for table in angles)
    q, k = q.detach(), k.detach()
    if norms is not None:
        q, k = (rms_normed(x, w.detach(), norms.epsilon) for x, w in ((q, norms.q), (k, norms.k)))
    turned = (_rotated(x, cos, sin) for x in (q, k))
    first, second = (x.masked_fill(~is_known[:, None, None], torch.nan) for x in turned)
    return first, second


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R(R(x cos) + R(y sin)), y the other half of x, (a, b) -> (-b, a)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
