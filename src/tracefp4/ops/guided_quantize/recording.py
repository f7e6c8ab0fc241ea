"""Rounding to nearest together with what a codec keeps: by the kernel of recording.cu in one pass, by C and torch on a
CPU, and by the definition."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.coding import Codec, SyndromeCode
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.device import KernelFile, Launch
from tracefp4.ops.guided_quantize.compiled import guided_quantize_compiled, syndromes_compiled
from tracefp4.ops.guided_quantize.keeping import CODE_BITS, SCALE_BITS, Recorded, kept_codes, kept_scales
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.guided_quantize.rows import (
    WARP,
    Shape,
    check_rows,
    outer_of,
    readable_rows,
    row_variant,
    shape_of,
)
from tracefp4.ops.guided_quantize.values import Rounded
from tracefp4.ops.kernels import first_difference
from tracefp4.ops.parity_checks import numbers_on
from tracefp4.ops.rules import SchemeCase


def recorded_quantize_reference(
    x: Tensor, scheme: Scheme, codec: Codec, exponent: int | None, with_codes: bool
) -> Recorded:
    """Round checked rows and keep; see `recorded_quantize`."""
    rounded = guided_quantize_reference(x, scheme, None, exponent, True)
    assert rounded.codes is not None
    return Recorded(
        rounded=rounded,
        payload=kept_codes(rounded.codes, codec),
        scales=kept_scales(rounded.block_scales, codec),
    )


def recorded_quantize_compiled(
    x: Tensor, scheme: Scheme, codec: Codec, exponent: int | None, with_codes: bool
) -> Recorded:
    """Round checked rows and keep; see `recorded_quantize`."""
    rounded = guided_quantize_compiled(x, scheme, None, exponent, True)
    assert rounded.codes is not None
    codes, scales = rounded.codes, rounded.block_scales
    return Recorded(
        rounded=rounded,
        payload=kept_codes(codes, codec) if codec.code is None else syndromes_compiled(codes, codec.code),
        scales=kept_scales(scales, codec)
        if codec.scale_code is None
        else syndromes_compiled(scales, codec.scale_code),
    )


def recorded_quantize_on_device(
    x: Tensor, scheme: Scheme, codec: Codec, exponent: int | None, with_codes: bool
) -> Recorded:
    """Round checked rows and keep; see `recorded_quantize`."""
    x_NK = readable_rows(x)
    shape, (rows, width), device = shape_of(x_NK, scheme), x_NK.shape, x_NK.device
    num_blocks = width // scheme.block_size

    def made(num_bytes: int) -> Tensor:
        return torch.empty((rows, num_bytes), dtype=torch.uint8, device=device)

    values_NK, codes_NK, block_scales_NG = torch.empty_like(x_NK), None, made(num_blocks)
    if with_codes:
        codes_NK = made(width)
    variant = {**row_variant(x_NK, scheme), **_variant(codec, scheme, shape)}
    outer, payload = outer_of(x_NK, scheme, exponent, KERNELS, variant), made(codec.payload_bytes(width))
    is_raw = SCALE_BITS[codec.scale_coding] == 8
    scales = block_scales_NG if is_raw else made(codec.scale_bytes(num_blocks))
    words = max(_words(codec.code, width), _words(codec.scale_code, num_blocks))
    launch = Launch("recorded_rows", (shape.grid,), shape.of_block, variant, 4 * words * shape.slots)
    numbers = [None if code is None else numbers_on(code, device) for code in (codec.code, codec.scale_code)]
    results = (outer, block_scales_NG, values_NK, codes_NK, payload, None if is_raw else scales)
    KERNELS.launch(launch, x_NK, rows, width, shape.of_row, *numbers, *results, device=device)
    rounded = Rounded(
        values=values_NK.to(x.dtype),
        codes=codes_NK,
        block_scales=block_scales_NG,
        outer=outer,
        nearest_changed=torch.zeros((), dtype=torch.int64, device=device),
    )
    return Recorded(rounded=rounded, payload=payload, scales=scales)


def _variant(codec: Codec, scheme: Scheme, shape: Shape) -> dict[str, int | str]:
    team = _team(codec.code, scheme.block_size) if shape.of_row >= WARP else 0
    return {
        "PAYLOAD": CODE_BITS[codec.payload],
        "KEPT_SCALES": SCALE_BITS[codec.scale_coding],
        "TEAM": team,
        "CODE_BITS": codec.code.num_bits if codec.code is not None and team else 0,
    }


def _team(code: SyndromeCode | None, block_size: int) -> int:
    """Return how many neighbouring threads have a block of the code together, where the syndromes of a warp are whole
    bytes, at most two of them in each; 0 otherwise."""
    if code is None or code.length % block_size or code.num_bits < 8:
        return 0
    team = code.length // block_size
    return team if WARP // team * code.num_bits % 8 == 0 else 0


def _words(code: SyndromeCode | None, width: int) -> int:
    """Words of shared memory of a row: its bits, and its syndromes."""
    return 0 if code is None else -(-width // 32) + 1 + -(-code.num_blocks(width) * code.num_bits // 32)


def differences(device: torch.device, case: SchemeCase, codec: Codec) -> str | None:
    """Compare with the reference under one scheme, dtype and codec; return what differs, or None."""
    return first_difference(_pairs(device, case, codec))


def _pairs(device: torch.device, case: SchemeCase, codec: Codec) -> Iterator[tuple[str, Tensor, Tensor]]:
    short = check_rows(case.scheme, (codec.code, codec.scale_code)).to(device, case.dtype)
    for x in (short, short.repeat(1, 1 + WARP * case.scheme.block_size // short.shape[1])):
        operands = (x, case.scheme, codec, 3 if case.scheme.outer == "static" else None, True)
        got, wanted = recorded_quantize_on_device(*operands), recorded_quantize_reference(*operands)
        yield "payload", got.payload, wanted.payload
        yield "kept scales", got.scales, wanted.scales
        for field in fields(wanted.rounded):
            mine, theirs = getattr(got.rounded, field.name), getattr(wanted.rounded, field.name)
            if theirs is not None:
                yield field.name, mine, theirs


KERNELS = KernelFile(Path(__file__).with_name("recording.cu"))
"""The kernel of recording.cu."""
