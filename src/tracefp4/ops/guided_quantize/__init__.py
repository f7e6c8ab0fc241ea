"""guided_quantize: round each value to a codeword next to it, following the rollout's recorded decision
where there is one.

    z = clip(x / decode_scale, -6, 6),   value = decode_scale * q*

without a guide   decode_scale is this tensor's own, q* = nearest even (z)
full codes        decode_scale is the rollout's, q* = the one of the two neighbours of z nearer to the
                  rollout's codeword
"bracket"         q* = the neighbour of z that has the recorded low bit or bits
"nearest_cell"    q* = among all codewords with the recorded low bit or bits, the one whose rounding cell is
                  nearest to z;
                  a tie goes to the smaller magnitude, and at z = 0 to the side of z's sign
syndromes         q* = nearest even (z), but for the cheapest set of values whose other parity explains the
                  difference between the recorded syndrome and the own one; those take the codeword of the
                  other parity whose cell is nearest
band              a codeword other than the nearest is taken only if z lies at most this far from its cell

If z is itself a codeword (also the clipped +-6), full codes and "bracket" give that codeword. A block whose
scale is 0 gives 0. So full codes and "bracket" move a value by less than one step; they never copy the
rollout. Where less than the scale bytes was recorded, they are decoded first, by the row's own unrounded scales.
`decoding.py` and `scale_decoding.py` hold the rules in full.

This op knows bytes, not records: who recorded the guide, and for which token, is guidance's business.
"""

import torch
from torch import Tensor

from tracefp4.coding import Codec
from tracefp4.errors import FormatError
from tracefp4.formats.calibration import check_operand
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.guided_quantize.cells import boundary_distance
from tracefp4.ops.guided_quantize.compiled import guided_quantize_compiled
from tracefp4.ops.guided_quantize.decisions import kind_of
from tracefp4.ops.guided_quantize.device import Case, guided_quantize_on_device
from tracefp4.ops.guided_quantize.keeping import Recorded
from tracefp4.ops.guided_quantize.recording import (
    recorded_quantize_compiled,
    recorded_quantize_on_device,
    recorded_quantize_reference,
)
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.guided_quantize.rows import rows_case
from tracefp4.ops.guided_quantize.scale_decoding import check_decodable, check_outer
from tracefp4.ops.guided_quantize.values import Guide, Rounded

__all__ = [
    "Guide",
    "Recorded",
    "Rounded",
    "boundary_distance",
    "check_decodable",
    "guided_quantize",
    "recorded_quantize",
]

_ROUND = {
    Backend.CUDA: guided_quantize_on_device,
    Backend.COMPILED: guided_quantize_compiled,
    Backend.REFERENCE: guided_quantize_reference,
}
_RECORD = {
    Backend.CUDA: recorded_quantize_on_device,
    Backend.COMPILED: recorded_quantize_compiled,
    Backend.REFERENCE: recorded_quantize_reference,
}


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
        x: Float [N, K], K a positive multiple of the block size; any strides. Arithmetic is float32 as in `quantize`.
        scheme: The scheme. A "tensor" scheme treats x as one matrix and takes no guide.
        guide: The rollout's decisions, or None to round to nearest even everywhere.
        exponent: Outer exponent of a static scheme, in [-110, 116]; must be None for the others.
        with_codes: False skips the codes (Rounded.codes is None): faster when only values are wanted.
        backend: Implementation.

    Returns:
        Values in x's dtype and the bytes behind them. A block of x with NaN or Inf gets the NaN byte and reads
        back NaN, guided or not; so does a block whose recorded scale is the NaN byte. Such a block of x disturbs
        only the blocks of syndromes that it lies in, which stay nearest where they differ. Empty N is fine. No
        autograd: callers wrap it.

    Raises:
        FormatError: When x, the guide or the exponent do not fit the scheme or each other. Recorded scales that no
            scheme stores are refused in the same way; on a GPU the kernel ends with an error, which the next call that
            waits for it reports.
        BackendError: When the backend cannot run here.
    """
    _check_input(x, scheme, exponent)
    if guide is not None:
        _check_guide(x, scheme, guide)
    case = Case(rows_case(x, scheme), None if guide is None else kind_of(guide))
    chosen = choose("guided_quantize", x.device, backend, case)
    if (
        guide is not None and chosen is not Backend.CUDA
    ):  # whose kernel looks itself, without waiting for the device
        check_outer(guide, scheme)
    return _ROUND[chosen](x, scheme, guide, exponent, with_codes)


def recorded_quantize(
    x: Tensor,
    *,
    scheme: Scheme,
    codec: Codec,
    exponent: int | None = None,
    with_codes: bool = True,
    backend: Backend = Backend.AUTO,
) -> Recorded:
    """Round to nearest as `guided_quantize` without a guide does, and keep what a codec keeps; on a GPU in one pass.

    Args:
        x: Float [N, K], as for `guided_quantize`.
        scheme: The scheme.
        codec: What is kept of codes and scale bytes.
        exponent: Outer exponent of a static scheme, in [-110, 116]; must be None for the others.
        with_codes: False if nobody reads `rounded.codes`, which may then be None.
        backend: Implementation.

    Returns:
        The rounding, and the bytes of every row in the layout of `keeping.py`.

    Raises:
        FormatError: When x or the exponent do not fit the scheme.
        BackendError: When the backend cannot run here.
    """
    _check_input(x, scheme, exponent)
    chosen = choose("guided_quantize", x.device, backend, Case(rows_case(x, scheme), codec))
    return _RECORD[chosen](x, scheme, codec, exponent, with_codes)


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
    if (guide.outer is None) == (scheme.outer == "row"):
        needs = "one outer scale per row" if scheme.outer == "row" else "no outer scale per row"
        raise FormatError(
            f"A guide under {scheme.name} has {needs}; got outer={guide.outer}. Check the record's scheme."
        )
    for name, (dtype, shape) in _expected_parts(x, scheme, guide).items():
        part = getattr(guide, name)
        if part is not None and (
            part.dtype != dtype or tuple(part.shape) != shape or part.device != x.device
        ):
            raise FormatError(
                f"A guide for x of shape {tuple(x.shape)} on {x.device} needs {name} as {dtype} {shape} there; got "
                f"{part.dtype} {tuple(part.shape)} on {part.device}. Check that the record covers these positions."
            )
    check_decodable(guide.scale_coding, scheme)


def _expected_parts(
    x: Tensor, scheme: Scheme, guide: Guide
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor that a guide for x may hold."""
    rows, width = x.shape
    num_blocks = width // scheme.block_size
    scale_width = num_blocks if guide.scale_code is None else guide.scale_code.row_bytes(num_blocks)
    return {
        "valid": (torch.bool, (rows,)),
        "outer": (torch.int8 if scheme.outer_kind == "exponent" else torch.float32, (rows,)),
        "block_scales": (torch.uint8, (rows, scale_width)),
        "codes": (torch.uint8, (rows, width)),
        "bits": (torch.uint8, (rows, width)),
        "syndromes": (torch.uint8, (rows, 0 if guide.code is None else guide.code.row_bytes(width))),
    }
