"""Write new keys or values into cache pages, in place.

Pages of one layer and one of K/V are laid out head-first, so that one head's page is contiguous:

    packed        uint8 [C, F, S, D/2]     two codes a byte, low nibble first
    block_scales  uint8 [C, F, S, D/16]    one E4M3 byte per 16 values along the head dimension
    or the same bytes moved within tiles of 16 tokens, as GPUs read them (formats/fragments.py)
    or, unquantized, one float tensor [C, F, S, D]

C kv heads, F frames, S slots per page, D head dim. Blocks lie inside one token and one head, never across
tokens: bytes already written cannot change when a later token arrives. Slot number = frame * S + offset.
"""

from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.calibration import check_operand
from tracefp4.formats.fragments import BLOCK_SIZE, FragmentPages
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.kv_append.device import append_on_device, quantize_append_on_device
from tracefp4.ops.kv_append.reference import append_reference, quantize_append_reference
from tracefp4.ops.pages import LayerPages, Pages, QuantizedPages
from tracefp4.ops.rules import case_of

_APPEND = {Backend.CUDA: append_on_device, Backend.REFERENCE: append_reference}
_QUANTIZE_APPEND = {Backend.CUDA: quantize_append_on_device, Backend.REFERENCE: quantize_append_reference}


def kv_append(
    pages: Pages,
    rows: BlockTensor | Tensor,
    *,
    slots: Tensor,
    backend: Backend = Backend.AUTO,
) -> None:
    """Store one row per token at its slot; other slots keep their bytes.

    Args:
        pages: the layer's K or V pages, a layout above, contiguous; modified in place.
        rows: [T, C, D] in the same storage: a BlockTensor (packed [T, C, D/2], block_scales [T, C, D/16])
            under the pages' scheme and outer scale, or a float tensor (cast to the pages' dtype).
        slots: int64 [T], each in 0 .. F*S-1 and distinct, or negative: such a row is stored nowhere. T = 0 is allowed
            and writes nothing.
        backend: Implementation.

    Raises:
        FormatError: storage kinds, schemes, outer scales or shapes of pages and rows differ.
        BackendError: the backend cannot run here.
    """
    chosen = choose("kv_append", slots.device, backend)
    if isinstance(pages, Tensor) and isinstance(rows, Tensor):
        _check_shape(pages, rows, slots)
    elif isinstance(pages, BlockTensor | FragmentPages) and isinstance(rows, BlockTensor):
        _check_scheme(pages, rows)
        _check_shape(pages.packed, rows.packed, slots)
    else:
        raise FormatError(
            f"Pages and rows must use one kind of storage; got pages {type(pages).__name__} and rows "
            f"{type(rows).__name__}. Both are FP4 (rows a BlockTensor) or both Tensor. Use the precision of the "
            "layer's pool."
        )
    _APPEND[chosen](pages, rows, slots)


def kv_quantize_append(
    pages: LayerPages, k: Tensor, v: Tensor, *, slots: Tensor, backend: Backend = Backend.AUTO
) -> tuple[BlockTensor, BlockTensor]:
    """Quantize the K and V of new tokens as `ops.quantize` does, and store them at their slots, in one pass.

    Args:
        pages: K and V of the layer, FP4 under one scheme with a static power of two, contiguous; modified in place.
        k: float [T, C, D], after RoPE; read as `ops.quantize` reads its operand.
        v: the same shape and dtype. Both may be views into the output of one projection, which the kernel reads where
            it lies.
        slots: as for `kv_append`; rows with a negative one are quantized and returned all the same.
        backend: Implementation.

    Returns:
        The rows of K and of V in plain order, as a record keeps them, under the pages' outer scales.

    Raises:
        FormatError: schemes, dtypes or shapes do not fit.
        BackendError: the backend cannot run here.
    """
    found = [part for part in (pages.keys, pages.values) if not isinstance(part, Tensor)]
    if len(found) < 2 or k.dtype != v.dtype or not _is_one_scheme(*found):
        names = [part.scheme.name for part in found] or "floats"
        raise FormatError(
            "kv_quantize_append needs K and V of one dtype, and pages of one scheme with a static power of two and "
            f"blocks of {BLOCK_SIZE}; got {k.dtype} and {v.dtype}, pages of {names}. Use NVFP4_KV."
        )
    keys, values = found
    for part, x in ((keys, k), (values, v)):
        check_operand(x, part.scheme, int(part.outer))
        _check_shape(part.packed, x[..., ::2], slots)
    chosen = choose("kv_append", slots.device, backend, case_of(k, keys.scheme))
    return _QUANTIZE_APPEND[chosen](keys, values, k, v, slots)


def _is_one_scheme(keys: QuantizedPages, values: QuantizedPages) -> bool:
    scheme = keys.scheme
    is_static = scheme.outer == "static" and scheme.is_exact_in_bf16
    return is_static and scheme == values.scheme and scheme.block_size == BLOCK_SIZE


def _check_scheme(pages: QuantizedPages, rows: BlockTensor) -> None:
    found = (rows.scheme.name, int(rows.outer))
    expected = (pages.scheme.name, int(pages.outer))
    if found != expected:
        raise FormatError(
            "Rows were quantized under another scheme than the pages; got scheme and outer exponent "
            f"{found}, the pages hold {expected}. They must be equal. Quantize K and V with the layer's "
            "precision."
        )


def _check_shape(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    expected = (slots.shape[0], pages.shape[0], pages.shape[3])
    if tuple(rows.shape) != expected or not pages.is_contiguous():
        raise FormatError(
            f"Rows do not fit the pages; got shape {tuple(rows.shape)} for {slots.shape[0]} slots and pages "
            f"of shape {tuple(pages.shape)}, strides {pages.stride()}. Expected {expected}: tokens, kv heads, row "
            "bytes or values; and contiguous pages. Reshape before appending."
        )
