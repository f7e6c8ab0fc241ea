"""The GPU kernels of sample against the reference and float64: logits, tile weights, draws, in any order of threads."""

import math
from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import BackendError, FormatError
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.sample import Draws, draw, sample
from tracefp4.ops.sample import device as sample_device
from tracefp4.ops.sample.device import (
    TILE,
    TOLERANCE,
    Logits,
    check_operands,
    differences,
    draw_on_device,
    logits_on_device,
    sample_on_device,
)
from tracefp4.ops.sample.noise import uniform
from tracefp4.ops.sample.reference import inverse_cdf, sample_reference, truncated

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(sample_device.HEAD, "runner", emulator)
    monkeypatch.setattr(sample_device.LIBRARY, "runner", emulator)
    monkeypatch.setattr(sample_device, "_DRAW_THREADS", 128)  # several warps; more of them take longer
    return emulator


def columns(size, *, temperature=1.0, top_k=0, top_p=1.0, forced=None):
    """Draws with the same parameters, or with one per row."""
    column = lambda x, dtype: torch.as_tensor(x, dtype=dtype).expand(size).contiguous()  # noqa: E731
    return Draws(
        keys=torch.arange(size) * 0x5851F42D4C957F2D,
        positions=torch.arange(size) % 7,
        temperature=column(temperature, torch.float64),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        forced=None if forced is None else column(forced, torch.int64),
    )


def as_left_by_the_head(logits, temperature):
    """Logits [N, V] as head.cu leaves them."""
    num_rows, vocabulary = logits.shape
    tiles = -(-vocabulary // TILE)
    padded = torch.full((num_rows, tiles * TILE), -INF).bfloat16()
    padded[:, :vocabulary] = logits
    of_tiles = padded.double().view(num_rows, tiles, TILE)
    largest = of_tiles.nan_to_num(-INF, INF, -INF).amax(-1)
    sharpness = 1 / torch.where(temperature == 0, 1.0, temperature)
    below = of_tiles - torch.where(largest == -INF, 0.0, largest)[..., None]
    sums = (below * sharpness[:, None, None]).exp().sum(-1)
    return Logits(padded, torch.stack([largest, sums], -1).float().contiguous())


def assert_drawn(got, logits, draws, *, least_sure=1.0):
    """Log-probs are the reference's, and so are tokens unless u is within the tolerance of an edge."""
    is_greedy = draws.temperature == 0
    temperature = draws.temperature.masked_fill(is_greedy, 1.0)
    probs = torch.softmax(logits.double() / temperature[:, None], -1)
    probs = truncated(probs, top_k=draws.top_k, top_p=draws.top_p.masked_fill(is_greedy, 1.0))
    u = uniform(draws.keys, draws.positions)
    sides = [inverse_cdf(probs, (u + by).clamp(0, 1)) for by in (-TOLERANCE, TOLERANCE)]
    wanted = draw(logits, draws)
    is_sure = (sides[0] == sides[1]) | is_greedy
    if draws.forced is not None:
        is_sure |= draws.forced >= 0
    assert is_sure.float().mean() >= least_sure
    assert torch.equal(got.tokens[is_sure], wanted.tokens[is_sure])
    of_tokens = probs.gather(1, got.tokens[:, None])[:, 0].log()
    assert torch.equal(got.logprobs == -INF, of_tokens == -INF)
    assert bool(((got.logprobs - of_tokens).abs().nan_to_num(0.0) < TOLERANCE).all())
    assert got.logprobs.dtype == torch.float64 and got.tokens.dtype == torch.int64


def drawn(logits, draws):
    logits = logits.bfloat16()
    return draw_on_device(as_left_by_the_head(logits, draws.temperature), logits.shape[1], draws)


@needs_compiler
@pytest.mark.parametrize("kind", ["few", "many"])
def test_logits_are_rounded_once_and_tiles_are_weighed(emulator, kind):
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 200).bfloat16(), torch.randn(300, 200).bfloat16()
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0, 30.0], dtype=torch.float64)
    found = logits_on_device(hidden, head, temperature, kind)
    exact = hidden.double() @ head.double().T
    logits = found.logits[:, :300].double()
    # half the distance of bf16 numbers at the result, and float32 sums of 200 terms of about 1
    assert bool(((logits - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all())
    is_clear = (exact.bfloat16() - (exact * (1 + 1e-5)).bfloat16() == 0) & (exact.abs() > 0.1)
    is_clear &= exact.bfloat16() - (exact * (1 - 1e-5)).bfloat16() == 0
    assert is_clear.float().mean() > 0.9 and torch.equal(
        logits[is_clear], exact[is_clear].bfloat16().double()
    )
    assert bool((found.logits[:, 300:] == -INF).all())
    wanted = as_left_by_the_head(found.logits[:, :300], temperature)
    assert_bitwise(found.weights[..., 0].contiguous(), wanted.weights[..., 0].contiguous())
    torch.testing.assert_close(found.weights[..., 1], wanted.weights[..., 1], rtol=3e-6, atol=0)


@needs_compiler
def test_a_row_of_few_does_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(sample_device.HEAD, "runner", Emulator())
    torch.manual_seed(0)
    hidden, head, one = (
        torch.randn(35, 72).bfloat16(),
        torch.randn(130, 72).bfloat16(),
        torch.ones(35).double(),
    )
    wide = logits_on_device(hidden, head, one, "few")
    for first, last in ((0, 1), (20, 35)):
        narrow = logits_on_device(hidden[first:last], head, one[first:last], "few")
        assert_bitwise(narrow.logits, wide.logits[first:last])
        assert_bitwise(narrow.weights, wide.weights[first:last])
    assert [sample_device.kind_of(n) for n in (0, 1, 16, 17)] == ["few", "few", "few", "many"]


@needs_compiler
def test_weights_do_not_depend_on_who_multiplied(emulator):
    """Products are exact here; the vocabulary ends within a tile, or has more tiles than a strip."""
    for vocabulary in (1, 255, 256, 40 * TILE + 3):
        hidden = torch.randint(-4, 5, (3, 8)).bfloat16()
        head = torch.randint(-4, 5, (vocabulary, 8)).bfloat16()
        hidden[1, 0], head[0, 0] = INF, 1.0
        temperature = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)
        few, many = (logits_on_device(hidden, head, temperature, kind) for kind in ("few", "many"))
        for one, other in zip(few, many, strict=True):
            assert torch.equal(one.nan_to_num(7e4, 1e5, -1e5), other.nan_to_num(7e4, 1e5, -1e5))


CUTS = {
    "plain": {},
    "greedy": {"temperature": 0.0, "top_k": torch.tensor([0, 1, 7, 700] * 8), "top_p": 0.5},
    "top_k": {"top_k": torch.tensor([1, 2, 50, 699, 700, 10_000, 0, 300] * 4), "temperature": 1.7},
    "top_p": {"top_p": torch.tensor([0.0, 1e-9, 0.3, 0.9, 0.999, 1.0, 0.7, 0.5] * 4).double()},
    "both": {"top_k": 20, "top_p": 0.8, "temperature": torch.tensor([0.3, 1.0, 1.5, 0.01] * 8).double()},
}


@needs_compiler
@pytest.mark.parametrize("cut", CUTS)
def test_draws_are_those_of_the_reference(emulator, cut):
    torch.manual_seed(1)
    logits = (torch.randn(32, 700) * torch.tensor([0.5, 2.0, 6.0, 20.0] * 8)[:, None]).bfloat16()
    draws = columns(32, **CUTS[cut])
    assert_drawn(drawn(logits, draws), logits, draws)


@needs_compiler
def test_ties_at_a_cut_keep_the_lowest_ids(emulator):
    torch.manual_seed(2)
    logits = torch.randint(-2, 3, (12, 300)).bfloat16()
    logits[::2] = 0.0  # every token ties
    draws = columns(12, top_k=torch.arange(12) * 23 + 1)
    got = drawn(logits, draws)
    assert_drawn(got, logits, draws)
    assert bool((got.tokens[::2] < draws.top_k[::2]).all())
    for top_p in (0.333, 0.777):
        draws = columns(12, top_k=torch.arange(12) * 23 + 1, top_p=top_p)
        assert_drawn(drawn(logits, draws), logits, draws)
    zeros = torch.zeros(20, 20) * torch.tensor([-1.0, 1.0] * 10)  # of both signs: they tie
    scored = drawn(zeros, columns(20, top_k=7, forced=torch.arange(20)))
    assert scored.logprobs.tolist() == pytest.approx([-math.log(7)] * 7 + [-INF] * 13)


@needs_compiler
def test_a_vocabulary_with_more_tiles_than_a_warp_has_threads(emulator):
    torch.manual_seed(5)
    logits = torch.randint(-3, 3, (6, 130 * TILE)).bfloat16()
    draws = columns(
        6, top_k=torch.tensor([0, 5000, 100, 9000, 0, 16_000]), top_p=torch.tensor([1, 1, 1, 0.7, 0.4, 1])
    )
    assert_drawn(drawn(logits, draws), logits, draws, least_sure=0.5)
    last = replace(draws, forced=torch.full((6,), 129 * TILE))
    assert_drawn(drawn(logits, last), logits, last)


@needs_compiler
def test_cuts_far_below_the_largest_logit(emulator):
    """Beyond the first window of keys, which ends 2^-64 below the largest: some 1e-25, and negative ones."""
    torch.manual_seed(3)
    logits = torch.randn(6, 260).sign() * (0.03 + torch.rand(6, 260))
    logits[:, 77] = 1e-25
    draws = columns(6, temperature=2.0, top_k=torch.tensor([20, 100, 150, 250, 130, 259]), top_p=0.97)
    assert_drawn(drawn(logits, draws), logits.bfloat16(), draws)
    draws = columns(6, temperature=2.0, top_p=torch.tensor([0.2, 0.55, 0.6, 0.95, 0.8, 0.999]).double())
    assert_drawn(drawn(logits, draws), logits.bfloat16(), draws)
    draws = columns(6, top_k=(logits > 0).sum(1) + 1, forced=77)  # the only one that the second window holds
    assert_drawn(drawn(logits, draws), logits.bfloat16(), draws)


@needs_compiler
def test_frequencies_are_the_probabilities(monkeypatch):
    monkeypatch.setattr(sample_device.LIBRARY, "runner", Emulator())
    monkeypatch.setattr(sample_device, "_DRAW_THREADS", 32)
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = torch.full((500, 140), -INF)
    logits[:, [3, 50, 127, 139]] = probs.log2() / 4  # exact in bf16
    draws = columns(500, temperature=0.25 * math.log2(math.e))
    got = drawn(logits, draws)
    found = torch.bincount(got.tokens, minlength=140)[[3, 50, 127, 139]]
    # four standard deviations of a share of 500 draws are 0.09 at most
    assert bool(((found / 500 - probs).abs() < 0.09).all()) and found.sum() == 500


@needs_compiler
def test_rows_that_cannot_be_drawn_and_tokens_that_are_given(emulator):
    logits = torch.randn(9, 200)
    logits[0, 7], logits[1, 150], logits[2], logits[3, 5:] = NAN, INF, -INF, -INF
    logits[4, :150] = -INF
    logits[6], logits[6, 10], logits[8, 0] = -3.0, 5.0, NAN
    forced = torch.tensor([-1, -1, -1, -1, -1, 199, 10, 200, 4])
    draws = columns(9, forced=forced)
    got = drawn(logits, draws)
    assert got.tokens[[0, 1, 2]].tolist() == [-1] * 3 and got.tokens[[5, 6, 7, 8]].tolist() == [
        199,
        10,
        200,
        4,
    ]
    assert got.logprobs.isnan().tolist() == [True] * 3 + [False] * 4 + [True] * 2
    assert 0 <= got.tokens[3] < 5 and got.tokens[4] >= 150
    fine = torch.tensor([3, 4, 5, 6])
    rows = replace(draws, **{name: getattr(draws, name)[fine] for name in Draws.__dataclass_fields__})
    picked = type(got)(got.tokens[fine], got.logprobs[fine])
    assert_drawn(picked, logits[fine].bfloat16(), rows)
    draws = columns(2, forced=torch.tensor([10, 11]), top_k=1)
    assert drawn(logits[[6, 6]], draws).logprobs.tolist() == [0.0, -INF]


def test_the_reference_refuses_the_same_rows():
    hidden, head = torch.zeros(4, 8).bfloat16(), torch.ones(20, 8).bfloat16()
    hidden[0, 0], hidden[1, 0] = NAN, INF
    got = sample_reference(hidden, head, columns(4, forced=torch.tensor([-1, 3, 20, 19])))
    assert got.tokens.tolist() == [-1, 3, 20, 19] and got.logprobs.isnan().tolist() == [True] * 3 + [False]
    assert got.logprobs[3].item() == pytest.approx(-math.log(20))


@needs_compiler
def test_from_hidden_states_to_tokens(emulator):
    torch.manual_seed(4)
    hidden, head = (
        torch.randn(3, 41, 16).bfloat16()[:, ::41].reshape(3, 16),
        torch.randn(150, 17).bfloat16()[:, 1:],
    )
    draws = columns(3, top_p=0.9)
    got, wanted = sample_on_device(hidden, head, draws), sample_reference(hidden, head, draws)
    assert torch.equal(got.tokens, wanted.tokens)
    torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=0, atol=TOLERANCE)
    again = sample_on_device(hidden, head, draws)
    assert_bitwise(again.logprobs, got.logprobs)
    empty = sample_on_device(hidden[:0], head, columns(0))
    assert empty.tokens.shape == empty.logprobs.shape == (0,)


@needs_compiler
@pytest.mark.slow
def test_the_check_at_first_use(emulator, monkeypatch):
    monkeypatch.setattr(sample_device, "_DRAW_THREADS", 512)
    for kind in ("few", "many"):
        assert differences(CPU, kind) is None


def test_the_check_at_first_use_has_no_token_at_an_edge():
    hidden, head, draws = check_operands(CPU)
    exact = hidden.float() @ head.float().T
    assert torch.equal(exact.double(), hidden.double() @ head.double().T)
    assert_drawn(draw(exact.bfloat16(), draws), exact.bfloat16(), draws)


def test_operands_that_do_not_fit_are_refused():
    hidden, head = torch.zeros(2, 16).bfloat16(), torch.zeros(5, 16).bfloat16()
    for wrong in (
        (hidden.float(), head),
        (hidden, head[:, :8]),
        (hidden[:, :9], head[:, :9]),
        (hidden, head[:0]),
    ):
        with pytest.raises(FormatError, match="multiple of 8"):
            sample(*wrong, columns(2))
    with pytest.raises(FormatError, match="keys as torch.int64"):
        sample(hidden, head, columns(3))
    with pytest.raises(FormatError, match="top_p as torch.float64"):
        sample(hidden, head, replace(columns(2), top_p=torch.ones(2)))
    with pytest.raises(BackendError, match="sample cannot run CUDA here"):
        sample(hidden, head, columns(2), backend=Backend.CUDA)
    assert sample(hidden, head, columns(2)).logprobs.tolist() == pytest.approx([-math.log(5)] * 2)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_files_compile_for(architecture):
    built = nvrtc.build(sample_device.HEAD.program.source, defines={}, architecture=architecture)
    assert built.code[:4] == b"\x7fELF"
    built = nvrtc.build(
        sample_device.LIBRARY.program.source, defines={"THREADS": 512}, architecture=architecture
    )
    assert built.code[:4] == b"\x7fELF"
