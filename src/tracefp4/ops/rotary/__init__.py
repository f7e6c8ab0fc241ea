"""rotary: norm of queries and keys per head and rotary position embedding, between the projections and the cache.

    x = R(weight * R(x / rms(x)));   x = R(R(x cos) + R(rotate_half(x) sin)),   (a, b) -> (-b, a)

R rounds to bf16, where a bf16 tensor would be written; the norm is the one of `rms_norm`. Shapes: T tokens, H query
and C kv heads, D width of a head, L positions in the tables.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.rotary.device import Case, rotary_on_device
from tracefp4.ops.rotary.operands import Angles, HeadNorms
from tracefp4.ops.rotary.reference import rotary_reference

__all__ = ["Angles", "HeadNorms", "rotary"]

_ROTARY = {Backend.CUDA: rotary_on_device, Backend.REFERENCE: rotary_reference}
_HEAD_DIMS = (16, 32, 64, 128, 256, 512)


def rotary(
    q: Tensor,
    k: Tensor,
    *,
    norms: HeadNorms | None,
    angles: Angles,
    positions: Tensor,
    backend: Backend = Backend.AUTO,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys.

    Args:
        q: bfloat16 [T, H, D], D a power of two from 16 to 512; may be a view into the output of one projection for q, k
            and v, which the kernel reads where it lies. T = 0 is fine.
        k: bfloat16 [T, C, D], likewise.
        norms: Weights and epsilon; None turns heads as they are.
        angles: Tables; L at least 1.
        positions: int64 [T]; a position outside 0 .. L - 1 gives NaN.
        backend: Implementation.

    Returns:
        Queries and keys, contiguous. NaN and Inf stay in their head. No autograd.

    Raises:
        FormatError: When shapes or dtypes do not fit.
        BackendError: When the backend cannot run here.
    """
    _check(q, k, norms, angles, positions)
    chosen = choose("rotary", q.device, backend, Case(q.shape[2], norms is not None))
    return _ROTARY[chosen](q, k, norms, angles, positions)


def _check(q: Tensor, k: Tensor, norms: HeadNorms | None, angles: Angles, positions: Tensor) -> None:
    is_whole = q.dim() == k.dim() == 3 and q.shape[::2] == k.shape[::2] and q.shape[2] in _HEAD_DIMS
    if not is_whole or {q.dtype, k.dtype} != {torch.bfloat16}:
        raise FormatError(
            f"rotary needs bfloat16 q [T, H, D] and k [T, C, D] with D one of {_HEAD_DIMS}; got {q.dtype} "
            f"{tuple(q.shape)} and {k.dtype} {tuple(k.shape)}. Split the projections into heads first."
        )
    width = q.shape[2:]
    tables = (angles.cos, angles.sin)
    weights = () if norms is None else (norms.q, norms.k)
    fits = all(w.shape == width for w in weights) and all(t.shape[1:] == width for t in tables)
    fits = fits and tables[0].shape[0] == tables[1].shape[0] > 0 and positions.shape == q.shape[:1]
    dtypes = {x.dtype for x in (*weights, *tables)}
    if not fits or dtypes != {torch.bfloat16} or positions.dtype != torch.int64:
        raise FormatError(
            f"rotary needs bfloat16 weights [{width[0]}], bfloat16 tables [L, {width[0]}] and int64 positions "
            f"[{q.shape[0]}]; got weights {[tuple(w.shape) for w in weights]}, tables "
            f"{tuple(tables[0].shape)} and {tuple(tables[1].shape)}, of {dtypes}, and {positions.dtype} "
            f"{tuple(positions.shape)}. Grow the tables before the pass."
        )
