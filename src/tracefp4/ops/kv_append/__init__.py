"""Write new keys or values into cache pages, in place.

Pages of one layer and one of K/V are laid out head-first, so that one head's page is contiguous:

    packed        uint8 [C, F, S, D/2]     two codes a byte, low nibble first
    block_scales  uint8 [C, F, S, D/16]    one E4M3 byte per 16 values along the head dimension
    or, unquantized, one float tensor [C, F, S, D]

C kv heads, F frames, S slots per page, D head dim. Blocks lie inside one token and one head, never across
tokens: bytes already written cannot change when a later token arrives. Slot number = frame * S + offset.
"""

from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.kv_append import reference


def kv_append(pages: BlockTensor | Tensor, rows: BlockTensor | Tensor, *, slots: Tensor) -> None:
    """Store one row per token at its slot; other slots keep their bytes.

    Args:
        pages: the layer's K or V pages, layout above; modified in place.
        rows: [T, C, D] in the same storage: a BlockTensor (packed [T, C, D/2], block_scales [T, C, D/16])
            under the pages' scheme and outer scale, or a float tensor (cast to the pages' dtype).
        slots: int64 [T], distinct, each in 0 .. F*S-1. T = 0 is allowed and writes nothing.

    Raises:
        FormatError: storage kinds, schemes, outer scales or shapes of pages and rows differ.
    """
    if isinstance(pages, BlockTensor) and isinstance(rows, BlockTensor):
        _check_scheme(pages, rows)
        _check_shape(pages.packed, rows.packed, slots)
        reference.append(pages.packed, rows.packed, slots)
        reference.append(pages.block_scales, rows.block_scales, slots)
    elif isinstance(pages, Tensor) and isinstance(rows, Tensor):
        _check_shape(pages, rows, slots)
        reference.append(pages, rows, slots)
    else:
        raise FormatError(
            f"Pages and rows must use one kind of storage; got pages {type(pages).__name__} and rows "
            f"{type(rows).__name__}. Both are BlockTensor (FP4) or both Tensor. Use the precision of the "
            "layer's pool."
        )


def _check_scheme(pages: BlockTensor, rows: BlockTensor) -> None:
    found = (rows.scheme.name, int(rows.exponent))
    expected = (pages.scheme.name, int(pages.exponent))
    if found != expected:
        raise FormatError(
            "Rows were quantized under another scheme than the pages; got scheme and outer exponent "
            f"{found}, the pages hold {expected}. They must be equal. Quantize K and V with the layer's "
            "precision."
        )


def _check_shape(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    expected = (slots.shape[0], pages.shape[0], pages.shape[3])
    if tuple(rows.shape) != expected:
        raise FormatError(
            f"Rows do not fit the pages; got shape {tuple(rows.shape)} for {slots.shape[0]} slots and pages "
            f"of shape {tuple(pages.shape)}. Expected {expected}: tokens, kv heads, row bytes or values. "
            "Reshape before appending."
        )
