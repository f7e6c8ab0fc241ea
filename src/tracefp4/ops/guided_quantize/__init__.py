"""guided_quantize: round each value to a codeword next to it, following the rollout's recorded decision
where there is one.

    z = clip(x / decode_scale, -6, 6),   value = decode_scale * q*

without a guide   decode_scale is this tensor's own, q* = nearest even (z)
full codes        decode_scale is the rollout's, q* = the one of the two neighbours of z nearer to the
rollout's codeword "bracket"         q* = the neighbour of z whose mantissa bit is the recorded one
"nearest_cell"    q* = among all codewords with the recorded mantissa bit, the one whose rounding cell is
nearest to z;
                  a tie goes to the smaller magnitude, and at z = 0 to the side of z's sign

If z is itself a codeword (also the clipped +-6), full codes and "bracket" give that codeword. A block whose
scale is 0 gives 0. So full codes and "bracket" move a value by less than one step; they never copy the
rollout.

This op knows bytes, not records: who recorded the guide, and for which token, is guidance's business.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.scaling import check_operand
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.guided_quantize.values import Guide, Rounded

__all__ = ["Guide", "Rounded", "guided_quantize"]


def guided_quantize(
    x: Tensor,
    *,
    scheme: Scheme,
    guide: Guide | None = None,
    exponent: int | None = None,
    with_codes: bool = True,
    backend: Backend = Backend.AUTO,
) -> Rounded:
    """Quantize and dequantize rows, following a guide where it is valid.

    Args:
        x: Float [N, K], K a positive multiple of 16; any strides. Arithmetic is float32 as in `quantize`.
        scheme: The scheme. A "tensor" scheme treats x as one matrix and takes no guide.
        guide: The rollout's decisions, or None to round to nearest even everywhere.
        exponent: Outer exponent of a static scheme, in [-110, 116]; must be None for the others.
        with_codes: False skips the codes (Rounded.codes is None): faster when only values are wanted.
        backend: Implementation.

    Returns:
        Values in x's dtype and the bytes behind them. A block of x with NaN or Inf gets scale byte 0x7F and
        reads back NaN, guided or not; so does a block whose recorded scale is 0x7F. Empty N is fine. No
        autograd: callers wrap it.

    Raises:
        FormatError: When x, the guide or the exponent do not fit the scheme or each other.
        BackendError: When the backend cannot run here.
    """
    choose("guided_quantize", x.device, backend)
    _check_input(x, scheme, exponent)
    if guide is not None:
        _check_guide(x, scheme, guide)
    return guided_quantize_reference(x, scheme, guide, exponent, with_codes)


def _check_input(x: Tensor, scheme: Scheme, exponent: int | None) -> None:
    check_operand(x, scheme, exponent)
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % scheme.block_size:
        raise FormatError(
            f"guided_quantize with {scheme.name} needs x [N, K] with K a positive multiple of "
            f"{scheme.block_size}; got shape {tuple(x.shape)}. Flatten the leading dimensions, or pad K."
        )


def _check_guide(x: Tensor, scheme: Scheme, guide: Guide) -> None:
    if scheme.outer == "tensor":
        raise FormatError(
            f"{scheme.name} cannot be guided: its outer scale depends on every row of the batch. "
            f"Got a guide for x of shape {tuple(x.shape)}. Use a row or static scheme for guided sites."
        )
    if (guide.exponent is None) == (scheme.outer == "row"):
        needs = "a row exponent int8 [N]" if scheme.outer == "row" else "no row exponent"
        raise FormatError(
            f"A guide under {scheme.name} has {needs}; got exponent={guide.exponent}. "
            "Check the record's scheme."
        )
    rows, width = x.shape
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "valid": (torch.bool, (rows,)),
        "exponent": (torch.int8, (rows,)),
        "block_scales": (torch.uint8, (rows, width // scheme.block_size)),
        "codes": (torch.uint8, (rows, width)),
        "bits": (torch.uint8, (rows, width)),
    }
    for name, (dtype, shape) in expected.items():
        part = getattr(guide, name)
        if part is not None and (part.dtype != dtype or tuple(part.shape) != shape):
            raise FormatError(
                f"A guide for x of shape {(rows, width)} needs {name} as {dtype} {shape}; "
                f"got {part.dtype} {tuple(part.shape)}. Check that the record covers these positions."
            )
