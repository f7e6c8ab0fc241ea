"""Bounds between values near their alternative and others: against the definition, and where the GPU kernel counts."""

from dataclasses import replace

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.scheme_inputs import by_name
from tests.ops.test_guided_quantize_device import assert_guided

from tracefp4.coding import syndrome_code
from tracefp4.formats.grid import magnitude_to_code, round_magnitude_
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import device as guided_device
from tracefp4.ops.guided_quantize.cells import alternative_steps, cell_distance, is_within
from tracefp4.ops.guided_quantize.nearness import near_bounds
from tracefp4.ops.guided_quantize.reference import guided_quantize_reference
from tracefp4.ops.guided_quantize.values import Guide
from tracefp4.ops.syndromes import encode_syndromes

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
BF16_NUMBERS = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
CODE = syndrome_code("bch64_3")


@pytest.mark.parametrize("band", [0.0, 1e-30, 0.04, 0.0625, 0.25, 0.3, 0.5, 0.99, 1.0, 3.0])
def test_bounds_are_those_of_every_bf16_number(band):
    y = BF16_NUMBERS.float()
    below, above = near_bounds(band, torch.device("cpu")).view(torch.uint8).view(8, 2, 2, 8).int().unbind(1)
    for i in range(8):
        z = (y / (1 + i / 8)).clamp(max=6.0)
        nearest = round_magnitude_(z.clone(), NVFP4_ROW_POW2.tie)[1]
        code = magnitude_to_code(nearest)
        other = alternative_steps(z, nearest.clone(), code) + code
        low, high = (number_of(part[i, 0] | part[i, 1] << 8)[code.long()] for part in (below, above))
        is_near = (y.clamp(max=24.0) < low) | (y.clamp(max=24.0) > high)
        assert torch.equal(is_near, is_within(cell_distance(z, code, other), band))


def number_of(bits):
    return bits.to(torch.int16).view(torch.bfloat16).float()


@needs_compiler
@pytest.mark.parametrize("scheme", [NVFP4_ROW_POW2, MXFP4_FLOOR], ids=by_name)
@pytest.mark.parametrize("band", [None, 0.0625, 1.0])
def test_near_values_are_counted_among_all_bf16_numbers(monkeypatch, scheme, band):
    """Under scales of every fraction, and of the smallest and the largest exponent; few syndromes differ."""
    monkeypatch.setattr(guided_device.LIBRARY, "runner", Emulator())
    is_row = scheme.outer == "row"
    scales = (0, 1, 3, 5, 7, *range(56, 65), 126) if is_row else (0, 1, 2, 100, 127, 200, 253, 254)
    x = torch.cat([BF16_NUMBERS, -BF16_NUMBERS]).repeat(len(scales), 1)
    for exponent in (-110, 0, 116) if is_row else (0,):
        guide = Guide(
            valid=torch.ones(len(x), dtype=torch.bool),
            outer=torch.full((len(x),), exponent, dtype=torch.int8) if is_row else None,
            block_scales=torch.tensor(scales, dtype=torch.uint8)[:, None].repeat(
                1, x.shape[1] // scheme.block_size
            ),
            bits=torch.zeros(x.shape, dtype=torch.uint8),
            band=0.0,
        )
        codes = guided_quantize_reference(x, scheme, guide, None, True).codes
        syndromes = encode_syndromes(codes, code=CODE, backend=Backend.REFERENCE)
        assert_guided(x, scheme, replace(guide, bits=None, syndromes=syndromes, code=CODE, band=band))
