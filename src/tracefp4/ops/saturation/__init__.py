"""saturation: count what a rounding could not represent, as `formats.saturation` defines it, in one pass.

On a GPU nothing is read back, and blocks whose scale byte rules everything out are not even loaded.
"""

from torch import Tensor

from tracefp4.formats.saturation import Saturation
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.rules import case_of
from tracefp4.ops.saturation.device import Case, saturation_on_device
from tracefp4.ops.saturation.reference import saturation_reference

__all__ = ["Saturation", "saturation"]

_COUNT = {Backend.CUDA: saturation_on_device, Backend.REFERENCE: saturation_reference}


def saturation(
    x: Tensor,
    scales: tuple[Tensor, Tensor],
    scheme: Scheme,
    *,
    is_recorded: bool = False,
    rows: Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> Saturation:
    """Count values that were clipped and block scales at the ends of their format.

    Args:
        x: Float [N, K], what was rounded.
        scales: Those used: scale bytes, uint8 [N, K / block size], and the outer scale as the scheme stores it, one
            per row or one.
        scheme: The rules.
        is_recorded: True where the scales came from somewhere else than x.
        rows: bool [N], False where nothing is counted; None counts everywhere.
        backend: Implementation.

    Returns:
        Counts of `formats.saturation`, int64 tensors of dimension 0 on x's device.

    Raises:
        BackendError: The backend cannot run here.
    """
    chosen = choose("saturation", x.device, backend, Case(case_of(x, scheme), is_recorded))
    return _COUNT[chosen](x, *scales, scheme, is_recorded, rows)
