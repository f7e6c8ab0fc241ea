"""What one site's rows decided, as a codec keeps it: payload, block scales and exponents, row by row.

A site whose tensor has several rows a token (the down-projection input has top_k) keeps them together, token-major.
This file knows no positions, no layers and no identities: those are the record's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracefp4.coding import Payload, ScaleCoding, codec_by_name
from tracefp4.errors import RecordError
from tracefp4.formats.block import NVFP4
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT
from tracefp4.guidance.payload import GuideParts, encode_block_scales, encode_codes, guide_parts
from tracefp4.ops.upload import upload_together

FULL = "full"
"""Codec of records as the rollout makes them: every code and scale byte as it was."""
BLOCK_SIZES = (16, 32)
"""Values per block scale that a record may have: NVFP4, MXFP4."""
MAX_SCALE_BYTE = 0x7F
"""Largest E4M3 scale byte that is stored, the NaN byte; larger ones are negative scales."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SiteRecord:
    """The decisions of one site for n rows of K values."""

    codec: str
    """Name of the codec (`coding.codec_by_name`): what is kept of codes and scales."""
    payload: Tensor
    """uint8 [n, codec.payload_bytes(K)]: what the codec keeps of the codes."""
    block_scales: Tensor
    """uint8 [n, codec.scale_bytes(G)]: what it keeps of the scale bytes; for raw scales the bytes themselves."""
    exponent: Tensor | None
    """int8 [n], power of two of every row; None for schemes with a static outer scale or none."""
    width: int
    """K, values per row."""
    block_size: int
    """Values per block scale, 16 (NVFP4) or 32 (MXFP4); K / block_size is G, the blocks of a row."""
    rows_per_token: int = 1
    """Rows that one position has: 1, or top_k at the down-projection input."""
    static_exponent: int | None = None
    """Power of two of a static outer scale, 0 for schemes without one; None for row schemes."""

    def __post_init__(self) -> None:
        codec, rows = codec_by_name(self.codec), self.block_scales.shape[0]
        if self.block_size not in BLOCK_SIZES or self.width % self.block_size or self.rows_per_token < 1:
            raise RecordError(
                f"A site record cannot have width {self.width}, block_size {self.block_size} and rows_per_token "
                f"{self.rows_per_token}. Block sizes are {BLOCK_SIZES}, the width is a multiple of one, and a token "
                "has at least one row. Build records with StepLog."
            )
        found = (tuple(self.payload.shape), tuple(self.block_scales.shape))
        needed = ((rows, codec.payload_bytes(self.width)), (rows, codec.scale_bytes(self.num_blocks)))
        exponent_rows = rows if self.exponent is None else self.exponent.shape[0]
        if found != needed or exponent_rows != rows:
            raise RecordError(
                f"Site record arrays disagree; got payload and block_scales of shape {found} and {exponent_rows} "
                f"exponents. Codec {self.codec!r} with width {self.width} and blocks of {self.block_size} needs "
                f"{needed} and one exponent per row, if any. Build records with StepLog."
            )
        if (self.exponent is None) == (self.static_exponent is None):
            raise RecordError(
                f"A site record has either row exponents or one static exponent; got exponent "
                f"{'None' if self.exponent is None else 'of shape ' + str(tuple(self.exponent.shape))} and "
                f"static_exponent {self.static_exponent}. Exactly one may be None. Give the one that the "
                "scheme uses."
            )

    def compact(self) -> SiteRecord:
        """The same rows in memory of their own."""
        return replace(
            self,
            payload=self.payload.clone(),
            block_scales=self.block_scales.clone(),
            exponent=None if self.exponent is None else self.exponent.clone(),
        )

    def on(self, device: torch.device) -> SiteRecord:
        """The same rows on a device; the copies are queued behind its work (`ops.upload`)."""
        held = [part for part in (self.payload, self.block_scales, self.exponent) if part is not None]
        payload, block_scales, *exponent = upload_together(held, device)
        return replace(
            self, payload=payload, block_scales=block_scales, exponent=exponent[0] if exponent else None
        )

    @property
    def num_blocks(self) -> int:
        """G, block scales per row."""
        return self.width // self.block_size

    @property
    def is_whole(self) -> bool:
        """True when nothing was dropped: whole codes and whole scale bytes."""
        codec = codec_by_name(self.codec)
        return codec.payload is Payload.FULL and codec.scale_coding is ScaleCoding.RAW

    def damaged_rows(self) -> Tensor:
        """Rows that no rollout records: bool [n].

        Those with a power of two outside MIN_EXPONENT..MAX_EXPONENT, or, where E4M3 scale bytes (NVFP4) are kept
        whole, with one above MAX_SCALE_BYTE. Any E8M0 byte, code, low bit and syndrome can have been recorded.
        """
        damaged = self.block_scales.new_zeros(self.block_scales.shape[0], dtype=torch.bool)
        if self.exponent is not None:
            damaged |= (self.exponent < MIN_EXPONENT) | (self.exponent > MAX_EXPONENT)
        is_raw = codec_by_name(self.codec).scale_coding is ScaleCoding.RAW
        if is_raw and self.block_size == NVFP4.block_size:
            damaged |= self.block_scales.amax(1) > MAX_SCALE_BYTE
        return damaged

    def guide_parts(self) -> GuideParts:
        """What was kept, unpacked, as fields of a Guide; see `guidance.payload.guide_parts`."""
        codec = codec_by_name(self.codec)
        return guide_parts(
            self.payload, self.block_scales, codec=codec, width=self.width, num_blocks=self.num_blocks
        )

    def codes(self) -> Tensor:
        """Return the codes of a whole record, uint8 [n, K].

        Raises: RecordError if the codec keeps less than whole codes and scale bytes.
        """
        codes = self.guide_parts()["codes"]
        if codes is None or not self.is_whole:
            raise RecordError(
                f"Whole codes and scales were asked for; got a site record of codec {self.codec!r}, which dropped "
                f"bits that nothing restores. Only {FULL!r} keeps them. Keep the engine's records before recoding them."
            )
        return codes

    def recode(self, codec: str) -> SiteRecord:
        """The same rows under a codec that keeps less; the codec's own name returns self.

        Raises: RecordError for any other change of a record that is not whole.
        """
        if codec == self.codec:
            return self
        target = codec_by_name(codec)
        return replace(
            self,
            codec=codec,
            payload=encode_codes(self.codes(), codec=target),
            block_scales=encode_block_scales(self.block_scales, codec=target),
        )

    def rows(self, begin: int, end: int) -> SiteRecord:
        """The part for begin .. end-1, counted from this record's first position. Views, no copy."""
        low, high = begin * self.rows_per_token, end * self.rows_per_token
        return replace(
            self,
            payload=self.payload[low:high],
            block_scales=self.block_scales[low:high],
            exponent=None if self.exponent is None else self.exponent[low:high],
        )
