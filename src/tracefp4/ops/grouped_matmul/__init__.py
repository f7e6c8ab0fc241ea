"""grouped_matmul: rows sorted by expert, each group multiplied by its own matrix.

    y[n] = w[e(n)] x[n],   e(n) = the group that row n falls into

Differentiable in x and w. It multiplies what it is given: quantization happens before. Shapes: N rows, K
in, M out, E experts. Alternative not taken: a padded batch of equal groups, whose cost depends on the
largest group.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.grouped_matmul.reference import grouped_matmul_reference


def grouped_matmul(x: Tensor, w: Tensor, group_sizes: Tensor, *, backend: Backend = Backend.AUTO) -> Tensor:
    """Multiply each group of rows by its expert's matrix.

    Args:
        x: Float [N, K], rows sorted by expert; N = 0 is fine.
        w: Same dtype, [E, M, K].
        group_sizes: int64 [E] on x's device, rows per expert, >= 0, sum N; empty experts are fine and get a zero
            gradient. On a GPU the sizes are not read back, so that nothing waits: other sums give other rows.
        backend: Implementation.

    Returns:
        [N, M], same dtype. NaN and Inf propagate as in a matrix product.

    Raises:
        FormatError: When shapes, dtypes or the sum of the sizes do not fit.
        BackendError: When the backend cannot run here.
    """
    choose("grouped_matmul", x.device, backend)
    shapes_fit = (
        x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[2] and group_sizes.shape == w.shape[:1]
    )
    if not shapes_fit or x.dtype != w.dtype:
        raise FormatError(
            "grouped_matmul needs x [N, K], w [E, M, K] of one dtype and group_sizes [E]; got "
            f"{x.dtype} {tuple(x.shape)}, {w.dtype} {tuple(w.shape)} and {tuple(group_sizes.shape)}. "
            "Check the expert axis."
        )
    if group_sizes.dtype != torch.int64 or (
        group_sizes.device.type == "cpu"
        and (bool((group_sizes < 0).any()) or int(group_sizes.sum()) != x.shape[0])
    ):
        raise FormatError(
            f"grouped_matmul needs int64 group_sizes >= 0 with sum {x.shape[0]}; got {group_sizes.dtype} "
            f"{group_sizes.tolist()}. Count the rows per expert with torch.bincount(ids, minlength=E)."
        )
    return grouped_matmul_reference(x, w, group_sizes)
