"""Rotary position embedding, default type: tables grown on demand, and the rotation itself.

Angle of position p and pair i: p * theta^(-2i/D), computed in float32 as transformers does; cos and sin are
rounded to bf16 where bf16 is emulated. Pairs are (i, i + D/2).
"""

import torch
from torch import Tensor

from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.ops.rotary import Angles


class RotaryTable:
    """cos and sin for positions 0, 1, 2, ...; the tables grow to the largest position asked for.

    Args:
        head_dim: D.
        theta: base of the frequencies.
        arithmetic: dtype of the tables, and whether they are rounded to bf16.
        device: where the tables live.
    """

    def __init__(self, head_dim: int, *, theta: float, arithmetic: Arithmetic, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        self._frequencies = 1.0 / (theta**exponents)
        self._arithmetic = arithmetic
        self._device = device
        self._cos = self._sin = torch.empty(0, head_dim, device=device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, D], for int64 positions [T]."""
        self.reserve(int(positions.max()) + 1)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]

    @property
    def angles(self) -> Angles:
        """The tables as they are, for `ops.rotary`; growing puts others in their place."""
        return Angles(self._cos, self._sin)

    def reserve(self, length: int) -> None:
        """Make the tables hold positions 0 .. length - 1; nothing happens, and nothing moves, if they do."""
        if length > self._cos.shape[0]:
            self._grow(max(length, 2 * self._cos.shape[0]))

    def _grow(self, length: int) -> None:
        # on the host, whatever the device: its cos and sin are then the same everywhere
        angles = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        tables = [table.to(self._arithmetic.torch_dtype) for table in (angles.cos(), angles.sin())]
        if self._arithmetic.emulates_bf16:
            tables = [round_bf16_(table) for table in tables]
        self._cos, self._sin = (table.to(self._device) for table in tables)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by the angles of its tokens: x * cos + rotate_half(x) * sin, (a, b) -> (-b, a)."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat([-high, low], dim=-1).mul_(sin))
