"""BlockTensor: a quantized tensor as stored bytes plus the scheme that made them.

    value[..., i] = E2M1(code[..., i]) * decode_scale[..., i // block size],  decode_scale as `scaling.py` says

It holds and checks bytes; it never quantizes (ops.quantize) and never multiplies matrices. The packed
layout is the one of `packing.py`. Alternative not taken: a torch.Tensor subclass, whose implicit
conversions hide where values are decoded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.packing import HalfPacked, unpack_codes
from tracefp4.formats.scaling import decode_scales
from tracefp4.formats.scheme import Scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTensor:
    """Packed codes, block scales and outer scale of a tensor of shape [..., K]."""

    packed: Tensor
    """uint8 [..., K / 2]; even index in the low nibble."""
    block_scales: Tensor
    """uint8 [..., K / block size]; E4M3 or E8M0 bytes. The scheme's NaN byte marks a block that held NaN or Inf."""
    outer: Tensor
    """The outer scale as the scheme stores it, int8 exponents or float32: shape [...] (row schemes), [...] without
    its last entry (tensor schemes, one per matrix of the last two dimensions), or 0-dimensional (static schemes,
    and an int8 zero for schemes without one)."""
    scheme: Scheme
    """The scheme whose rules made the bytes."""

    def __post_init__(self) -> None:
        """Refuse parts that do not belong together."""
        if isinstance(self.packed, HalfPacked):
            raise FormatError(
                f"{self.scheme.name} BlockTensor needs packed as a tensor of pairs; got HalfPacked, ggml's layout. "
                "Pass pack_codes of its codes()."
            )
        lead, width = self.packed.shape[:-1], self.packed.shape[-1] * 2
        outer_dtype = torch.int8 if self.scheme.is_exact_in_bf16 else torch.float32
        expected = {
            "packed": (torch.uint8, (*lead, width // 2)),
            "block_scales": (torch.uint8, (*lead, width // self.scheme.block_size)),
            "outer": (outer_dtype, {"row": lead, "tensor": lead[:-1]}.get(self.scheme.outer, ())),
        }
        for name, (dtype, shape) in expected.items():
            part = getattr(self, name)
            if part.dtype != dtype or tuple(part.shape) != tuple(shape):
                raise FormatError(
                    f"{self.scheme.name} BlockTensor of shape {(*lead, width)} needs {name} as "
                    f"{dtype} {tuple(shape)}; "
                    f"got {part.dtype} {tuple(part.shape)}. Rebuild it with ops.quantize."
                )

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that the bytes stand for, [..., K]."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    @property
    def num_bytes(self) -> int:
        """Bytes held: codes, block scales and outer scales."""
        return sum(part.numel() * part.itemsize for part in (self.packed, self.block_scales, self.outer))

    def codes(self) -> Tensor:
        """Return the unpacked codes, uint8 [..., K], values 0..15."""
        return unpack_codes(self.packed)

    def scales(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the decode scale of every block as `dtype` [..., K / block size]; see `decode_scales`."""
        return decode_scales(self.block_scales, self.outer, self.scheme, dtype)
