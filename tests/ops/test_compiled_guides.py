"""COMPILED against REFERENCE, bit for bit, for guides that hold less than codes and bytes."""

from dataclasses import replace

import pytest
import torch
from tests.ops.guides import EVERY_CODEC, coded_guide, is_decodable
from tests.ops.scheme_inputs import GUIDED, by_name, exponent_of, hard_matrices
from tests.ops.test_compiled import DTYPES, assert_equal

from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.guided_quantize import guided_quantize

pytestmark = pytest.mark.skipif(
    choose("guided_quantize", "cpu") is not Backend.COMPILED,
    reason="needs a C compiler; `tracefp4 doctor` says why",
)


def noisy_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rollout and trainer: hard rows and ordinary ones, [N, 1120], some of them far from each other; NaN in both."""
    hard = torch.cat([torch.nn.functional.pad(x, (0, 128 - x.shape[1])) for x in hard_matrices()])
    hard = hard[torch.randint(len(hard), (6, 9))].flatten(1)[:, :1120]
    x = torch.cat([hard, torch.randn(6, 1120), (torch.randn(4, 1120) * 8).round() / 8])
    noise = torch.tensor([0.0, 2.0**-9, 2.0**-7, 0.1])[torch.arange(len(x)) % 4]
    trainer = x * (1 + noise[:, None] * torch.randn_like(x))
    trainer[7, 40], x[8, 41], trainer[9, :64] = float("nan"), float("inf"), 0.0
    return x, trainer


@pytest.mark.parametrize("scheme", GUIDED, ids=by_name)
def test_guides_that_hold_less(scheme):
    """Every codec that the scheme can decode under every gate; dtypes, decoders and missing rows in turn."""
    num_changed = num_undecoded = 0
    for index, name in enumerate(EVERY_CODEC):
        if not is_decodable(name, scheme):
            continue
        x_rollout, x = noisy_rows()
        recorded = guided_quantize(
            x_rollout, scheme=scheme, exponent=exponent_of(scheme), backend=Backend.REFERENCE
        )
        for turn, band in enumerate((None, 0.04) if index % 2 else (0.0, 0.6)):
            guide = coded_guide(
                recorded,
                name,
                band=band,
                decoder=("nearest_cell", "bracket")[index // 2 % 2],
                valid=torch.rand(len(x)) < (0.8 if turn % 2 else 1.1),
            )
            got, wanted = (
                guided_quantize(
                    x.to(DTYPES[(index // 2 + turn) % 4]),
                    scheme=scheme,
                    guide=guide,
                    exponent=exponent_of(scheme),
                    with_codes=index % 3 != 0,
                    backend=backend,
                )
                for backend in (Backend.COMPILED, Backend.REFERENCE)
            )
            assert_equal(got, wanted)
            num_changed += int(wanted.nearest_changed)
            num_undecoded += int(wanted.undecoded)
    assert num_changed > 1000 and num_undecoded > 10


@pytest.mark.parametrize("name", EVERY_CODEC)
def test_random_syndromes_and_bits_of_random_rows(name):
    """What no rollout of x would give."""
    x = torch.randn(24, 1040) * torch.exp2(torch.randint(-12, 12, (24, 1)).float())
    guide = coded_guide(guided_quantize(x, scheme=NVFP4_ROW_POW2), name, valid=torch.rand(24) < 0.8)
    for part, end in (
        (guide.codes, 16),
        (guide.bits, 256),
        (guide.syndromes, 256),
        (guide.block_scales, 128),
    ):
        if part is not None:
            part.random_(0, end)
    assert guide.outer is not None
    guide.outer.random_(-20, 5)
    for band in (None, 0.1):
        both = [
            guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=replace(guide, band=band), backend=backend)
            for backend in (Backend.COMPILED, Backend.REFERENCE)
        ]
        assert_equal(*both)


@pytest.mark.parametrize(
    "name", ["low2", "parity7+parity61", "bch32_4+bch32_2", "bch512_3+bch512_1", "secded+bch256_2"]
)
def test_long_rows(name):
    """Many segments a row, blocks of the code that do not divide them, and several blocks of scales."""
    x_rollout = torch.randn(3, 10 * 1024 + 48)
    x = x_rollout * (1 + 2.0**-10 * torch.randn_like(x_rollout))
    recorded = guided_quantize(x_rollout, scheme=NVFP4_ROW_POW2)
    for band in (None, 0.05):
        guide = coded_guide(recorded, name, band=band)
        both = [
            guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide, backend=backend)
            for backend in (Backend.COMPILED, Backend.REFERENCE)
        ]
        assert_equal(*both)
        assert int(both[0].nearest_changed) > 20
