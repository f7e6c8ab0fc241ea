"""The definition of rms_norm: a sum in bf16, its norm (`ops/norms.py`), and the nearest codes of that."""

from torch import Tensor

from tracefp4.formats.scheme import Scheme
from tracefp4.ops.nearest import nearest_rows
from tracefp4.ops.norms import rms_normed
from tracefp4.ops.rms_norm.operands import Normed


def rms_norm_reference(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None, rule: tuple[Scheme, int | None] | None
) -> Normed:
    """Norm checked rows; see `rms_norm`."""
    x = x.detach() if residual is None else residual.detach() + x.detach()
    values = rms_normed(x, weight.detach(), epsilon)
    block_tensor = None if rule is None else nearest_rows(values, *rule)
    return Normed(values, None if residual is None else x, block_tensor)
