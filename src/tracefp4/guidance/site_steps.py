"""What a step log keeps of one site: its stored bytes, step by step, and the records that are gathered from them.

Nothing here knows sequences or positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracefp4.coding import Codec
from tracefp4.errors import RecordError
from tracefp4.guidance.record import Site
from tracefp4.guidance.site_record import SiteRecord


@dataclass(kw_only=True, eq=False, slots=True)
class SiteSteps:
    """What one site saw, step by step."""

    codec: Codec
    """What is kept of every row."""
    payload: list[Tensor] = field(default_factory=list)
    """uint8 [rows, codec.payload_bytes(K)], per step."""
    block_scales: list[Tensor] = field(default_factory=list)
    """uint8 [rows, codec.scale_bytes(G)], per step."""
    exponent: list[Tensor] = field(default_factory=list)
    """int8 [rows], or 0-dim for a static scheme, per step."""
    rows_per_token: int = 0
    """Rows of one token, the same in every step; 0 before the first step with tokens."""
    width: int = 0
    """K, values per row; 0 before the first step."""
    num_blocks: int = 0
    """G, block scales per row."""

    def hold(self, site: Site, layout: tuple[int, int, int]) -> None:
        """Take (width, blocks per row, rows per token) from a step; 0 rows per token: the step had no tokens.

        Raises: RecordError if it differs from an earlier step's, because rows could then not be told apart.
        """
        held = (self.width, self.num_blocks, self.rows_per_token)
        if any(old and new and old != new for old, new in zip(held, layout, strict=True)):
            raise RecordError(
                f"Site {site} changed its layout between two steps of a log; got (width, blocks per row, rows per "
                f"token) {layout} after {held}. All must be equal. Use one StepLog per model."
            )
        self.width, self.num_blocks = layout[:2]
        self.rows_per_token = self.rows_per_token or layout[2]

    def records(self, site: Site, rows: Tensor, lengths: list[int]) -> list[SiteRecord]:
        """Gather the flat tokens `rows`, int64, and split them into one record for each of `lengths`; views."""
        assert self.payload, "build before the first step"
        per_token = max(1, self.rows_per_token)
        if per_token != 1:
            rows = (rows[:, None] * per_token + torch.arange(per_token, device="cpu")).reshape(-1)
        sizes = [length * per_token for length in lengths]
        payload = gathered(self.payload, rows).split(sizes)
        block_scales = gathered(self.block_scales, rows).split(sizes)
        is_static = self.exponent[0].dim() == 0
        static_exponent = _one_exponent(site, self.exponent) if is_static else None
        exponent = None if is_static else gathered(self.exponent, rows).split(sizes)
        return [
            SiteRecord(
                codec=self.codec.name,
                payload=payload[i],
                block_scales=block_scales[i],
                exponent=None if exponent is None else exponent[i],
                width=self.width,
                block_size=self.width // self.num_blocks,
                rows_per_token=per_token,
                static_exponent=static_exponent,
            )
            for i in range(len(lengths))
        ]


def gathered(steps: list[Tensor], rows: Tensor) -> Tensor:
    """Return rows of all steps together, in host memory; `rows` count through the steps."""
    return torch.cat(steps).index_select(0, rows.to(steps[0].device)).cpu()


def _one_exponent(site: Site, exponents: list[Tensor]) -> int:
    found = torch.stack(exponents).unique().tolist()
    if len(found) != 1:
        raise RecordError(
            f"The static exponent of {site} changed during a log; got {found}. One value is allowed per log. "
            "Start a new StepLog after recalibrating."
        )
    return int(found[0])
