"""The GPU kernels of the expert layer, run on the processor: bytes against the reference, products against float64."""

from itertools import product

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.expert_cases import PRECISIONS, assert_right, case, operands

from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_TENSOR_POW2, SCHEMES
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import empty_fragments, to_fragments
from tracefp4.ops import nvrtc
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.expert_layer import device as kernels
from tracefp4.ops.expert_layer import routes as routes_device
from tracefp4.ops.expert_layer import tilings
from tracefp4.ops.expert_layer.device import differences, refit_on_device, run_steps
from tracefp4.ops.expert_layer.reference import round_rows
from tracefp4.ops.expert_layer.routes import sort_pairs
from tracefp4.ops.expert_layer.tilings import MOST, Tiling, tiling_of
from tracefp4.ops.quantize import quantize

ONE = Tiling("few", 1, 4, 2, 2)
FOUR = Tiling("few", 4, 2, 2, 2)
MANY = Tiling("many", 2, 4, 2, 3)
PIPED = Tiling("piped", 16, 2, 8, 5)
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


@pytest.fixture
def emulate(monkeypatch):
    def run_in(order):
        for library in kernels.FILES:
            monkeypatch.setattr(library, "runner", Emulator(order))

    run_in(0)
    return run_in


def in_order(rows, tiling):
    """Activations as the products of a tiling read them."""
    return kernels._round_rows(rows, PRECISIONS["bf16"], "x", False, in_steps=tiling.in_steps).operand


@needs_compiler
@pytest.mark.parametrize("tiling", [ONE, FOUR, MANY, PIPED], ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_every_step_is_that_of_the_definition(emulate, tiling, tokens):
    given = case(PRECISIONS["nvfp4"], tokens=tokens, hidden=208, inner=48)
    first = assert_right(given, tiling)
    for order in (1, 2, 3):
        emulate(order)
        again = run_steps(*operands(given), (tiling, False))
        assert torch.equal(again.h, first.h) and torch.equal(again.y, first.y)
        assert again.x.block_tensor is again.w2.block_tensor is None


@needs_compiler
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_experts_with_more_tokens_than_a_tile(emulate, name):
    """Whole tiles of 128 tokens, more than half of one, less than half of one."""
    given = case(PRECISIONS[name], tokens=150, hidden=416, inner=96)
    assert torch.bincount(given.routing.ids.flatten()).tolist() == [149, 80, 71]
    first = assert_right(given, tilings.PIPED)
    emulate(3)
    assert torch.equal(run_steps(*operands(given), (tilings.PIPED, False)).y, first.y)


@needs_compiler
@pytest.mark.parametrize("tiling", [ONE, MANY, PIPED], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "static", "bf16"])
def test_other_schemes(emulate, name, tiling):
    wide = {"hidden": 320, "inner": 96} if name == "bf16" else {"hidden": 96, "inner": 64}
    assert_right(case(PRECISIONS[name], tokens=9, **wide), tiling)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("tokens", [0, 3, 33])
@pytest.mark.parametrize("top_k", [1, 3])
def test_more_shapes(emulate, name, tokens, top_k):
    for tiling in (ONE, Tiling("few", 2, 4, 8, 2), FOUR, MANY, Tiling("many", 8, 4, 4, 3)):
        assert_right(
            case(PRECISIONS[name], tokens=tokens, top_k=top_k, hidden=672, inner=160, seed=top_k), tiling
        )


@needs_compiler
@pytest.mark.parametrize("tiling", [ONE, MANY, PIPED], ids=str)
def test_a_token_does_not_depend_on_the_others(emulate, tiling):
    given = case(PRECISIONS["nvfp4"], tokens=40, hidden=208, inner=48)
    together = run_steps(*operands(given), (tiling, False))
    for token in (0, 39):
        rows = slice(token, token + 1)
        routing = given.routing._replace(ids=given.routing.ids[rows], weights=given.routing.weights[rows])
        alone = run_steps(given.x[rows], routing, given.experts, given.precision, (tiling, False))
        assert torch.equal(alone.y[0], together.y[token])


@needs_compiler
@pytest.mark.parametrize("tilings", [(ONE, FOUR), (Tiling("many", 1, 4, 4, 4), MANY)], ids=str)
def test_tiles_of_any_number_of_tokens_give_the_same_bits(emulate, tilings):
    given = case(PRECISIONS["nvfp4"], tokens=40, hidden=208, inner=48)
    found = [run_steps(*operands(given), (tiling, False)).y for tiling in tilings]
    assert torch.equal(*found)


@needs_compiler
@pytest.mark.parametrize("tiling", [ONE, MANY, PIPED], ids=str)
def test_damage_stays_where_it_is_and_shows(emulate, monkeypatch, tiling):
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what is never written does not look damaged by chance
    given = case(PRECISIONS["nvfp4"], tokens=6, hidden=208, inner=48)
    clean = run_steps(*operands(given), (tiling, False)).y
    given.x[1, 5], given.x[2, 200] = float("nan"), float("-inf")
    given.routing.ids[3, 1], given.routing.ids[4, 0] = 4, -1
    steps = run_steps(*operands(given), (tiling, False))
    assert steps.y.isnan().all(1).tolist() == [False, True, True, True, True, False]
    assert torch.equal(steps.y[0], clean[0]) and torch.equal(steps.y[5], clean[5])
    given.experts.down.scales[:, 1, 0, 2, 1, 1] = 0x7F  # row 16 + 2 + 8 of every expert
    column = run_steps(*operands(given), (tiling, False)).y[0].isnan()
    assert column.nonzero().flatten().tolist() == [26]


@needs_compiler
@pytest.mark.parametrize("scheme", [NVFP4_TENSOR_POW2, MXFP4_FLOOR], ids=lambda s: s.name)
@pytest.mark.parametrize("tiling", [ONE, MANY, PIPED], ids=str)
def test_every_code_under_every_scale_is_exact(emulate, tiling, scheme):
    num_bytes = 128 if scheme is NVFP4_TENSOR_POW2 else 256
    codes = torch.arange(16, dtype=torch.uint8).repeat(num_bytes, 4)
    scales = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)[:, None]
    t = BlockTensor(
        packed=(codes[:, 0::2] | codes[:, 1::2] << 4)[None],
        block_scales=scales.expand(num_bytes, 64 // scheme.block_size)[None].contiguous(),
        outer=torch.tensor([-100] if scheme is NVFP4_TENSOR_POW2 else 0, dtype=torch.int8),
        scheme=scheme,
    )
    ids = torch.zeros(64, 1, dtype=torch.int64)
    routes = sort_pairs(ids, 1, 8 * tiling.token_tiles)
    y = torch.empty(64, num_bytes, dtype=torch.bfloat16)
    fragments = to_fragments(t)
    kernels._multiply(
        "down", (in_order(torch.eye(64).bfloat16(), tiling), routes, fragments), tiling, (num_bytes, y)
    )
    wanted = torch.eye(64) @ dequantize(t)[0].T  # NaN in columns with Inf: 0 * Inf
    is_number = ~wanted.isnan()
    assert torch.equal(y.float()[is_number], wanted[is_number]) and is_number.double().mean() > 0.98
    assert y[~is_number].isnan().all() and not is_number[:, -1].any()


@needs_compiler
@pytest.mark.parametrize("tiling", [ONE, MANY, PIPED], ids=str)
def test_nothing_is_written_beyond_the_rows(emulate, tiling):
    w = to_fragments(quantize(torch.randn(1, 48, 64), scheme=NVFP4_TENSOR_POW2))
    routes = sort_pairs(torch.zeros(3, 1, dtype=torch.int64), 1, 8 * tiling.token_tiles)
    y = torch.full((9, 48), 7.0).bfloat16()
    kernels._multiply("down", (torch.zeros(3, 64).bfloat16(), routes, w), tiling, (48, y))
    assert not y[:3].any() and (y[3:] == 7.0).all()


@needs_compiler
@pytest.mark.parametrize(("num_experts", "order"), [(1, 0), (5, 1), (5, 2), (5, 3), (300, 0)])
@pytest.mark.parametrize(("num_tokens", "num_chunks"), [(0, 128), (301, 128), (1301, 128), (1701, 2)])
def test_lists_are_a_stable_sort(emulate, monkeypatch, num_experts, order, num_tokens, num_chunks):
    """In one chunk, in chunks as long as usual, and in longer ones; some ids are no expert's."""
    emulate(order)
    monkeypatch.setattr(routes_device, "_MAX_CHUNKS", num_chunks)
    torch.manual_seed(order)
    ids = torch.randint(0, num_experts, (num_tokens, 2)).clamp(max=num_experts // 2 + 1)
    ids[ids == 2] = 3
    ids = ids.clamp(max=num_experts - 1)
    ids[num_tokens // 3 :: 7, 0], ids[num_tokens // 2 :: 9, 1] = -1, num_experts
    order, offsets, tiles = sort_pairs(ids, num_experts, 16)
    is_routed = (ids >= 0) & (ids < num_experts)
    wanted_ids, wanted = torch.sort(ids.where(is_routed, num_experts).reshape(-1), stable=True)
    num_routed = int(is_routed.sum())
    assert torch.equal(order[:num_routed].long(), wanted[:num_routed])
    counts = torch.bincount(wanted_ids[:num_routed], minlength=num_experts)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    starts = [
        [e, int(offsets[e]) + i] for e, count in enumerate(counts.tolist()) for i in range(0, count, 16)
    ]
    used = tiles[: len(starts)]
    assert used.tolist() == starts and (tiles[len(starts) :, 0] == -1).all()


@needs_compiler
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "static"])
def test_many_rows_are_rounded_as_few(emulate, name):
    """A thread holds several blocks; the widest row has more than all threads hold. In steps, lanes exchange values."""
    torch.manual_seed(0)
    for order, (num_rows, width) in enumerate([(3, 96), (2, 1120), (1, 33_024), (0, 64)]):
        emulate(order)
        x = (torch.randn(num_rows, width) * 2.0 ** torch.randint(-20, 20, (num_rows, 1))).bfloat16()
        wanted = round_rows(x, PRECISIONS[name], "x")
        for many, in_steps in product((False, True), repeat=2):
            got = kernels._round_rows(x, PRECISIONS[name], "x", True, in_steps=in_steps, many=many)
            assert torch.equal(got.values[:, :width].float(), wanted.values)
            assert not got.values[:, width:].any()
            for part in ("packed", "block_scales", "outer"):
                assert torch.equal(getattr(got.block_tensor, part), getattr(wanted.block_tensor, part))


def test_there_is_room_for_the_tiles_of_any_routing():
    for num_experts, num_pairs, tokens in ((4, 1, 8), (4, 40, 8), (128, 512, 8), (3, 17, 16)):
        spread = [num_pairs - num_experts + 1, *(1,) * (num_experts - 1)] if num_pairs >= num_experts else [1]
        even = [num_pairs // num_experts + (e < num_pairs % num_experts) for e in range(num_experts)]
        in_use = min(num_experts, num_pairs)
        room = in_use + (num_pairs - in_use) // tokens
        for counts in (spread, even, [num_pairs]):
            assert sum(-(-count // tokens) for count in counts) <= room


@needs_compiler
@pytest.mark.parametrize(
    "scheme", [NVFP4_TENSOR_POW2, MXFP4_FLOOR, SCHEMES["NVFP4_KV"]], ids=lambda s: s.name
)
def test_refit_gives_the_bytes_of_quantize(emulate, scheme):
    torch.manual_seed(0)
    weights = torch.randn(3, 48, 96) * 2.0 ** torch.randint(-20, 20, (3, 1, 1))
    weights[0, 3, 5], weights[1, 20, 32:64], weights[2, 47, 95] = float("nan"), 0.0, 3e6
    weights = weights.bfloat16()
    exponent = -5 if scheme.outer == "static" else None
    wanted = to_fragments(quantize(weights, scheme=scheme, exponent=exponent))
    fragments = empty_fragments(weights.shape, scheme, CPU)
    for order in (0, 1, 2, 3):
        emulate(order)
        fragments.words.fill_(0xEE), fragments.scales.fill_(0xEE)
        fragments.exponents.fill_(exponent or 99)
        refit_on_device(weights.transpose(1, 2).contiguous().transpose(1, 2), fragments)
        for part in ("words", "scales", "exponents"):
            assert torch.equal(getattr(fragments, part), getattr(wanted, part)), part


@needs_compiler
def test_unaligned_and_strided_operands(emulate):
    given = case(PRECISIONS["nvfp4"], tokens=6, hidden=208, inner=48)
    wanted = run_steps(*operands(given), (ONE, False)).y
    routing = given.routing._replace(
        ids=given.routing.ids.T.contiguous().T, weights=given.routing.weights.float().T.contiguous().T
    )
    shifted = torch.cat([torch.zeros(1).bfloat16(), given.x.flatten()])[1:].view(6, 208)
    for x in (shifted, given.x.T.contiguous().T):
        assert torch.equal(run_steps(x, routing, given.experts, given.precision, (ONE, False)).y, wanted)


@needs_compiler
@pytest.mark.slow
def test_the_check_at_first_use_passes_and_sees_a_fault(emulate, monkeypatch):
    usual = kernels._USUAL
    many = usual._replace(weight=MXFP4_FLOOR, activation=None, tiling=MOST, hidden=5, inner=1)
    piped = usual._replace(tiling=tilings.PIPED, hidden=9, inner=1)
    for checked in (usual, many, piped, NVFP4_TENSOR_POW2, MXFP4_FLOOR):
        assert differences(CPU, checked) is None
    monkeypatch.setattr(
        kernels, "round_rows", lambda x, precision, part: kernels_round_rows(-x, precision, part)
    )
    assert differences(CPU, usual) == "values of x of many rows"


kernels_round_rows = kernels.round_rows


def test_the_tiling_follows_the_tokens_of_an_expert():
    of_expert = (1, 4, 8, 16, 28, 32, 40, 64)
    assert [tiling_of(128 * n, 128, CPU).token_tiles for n in of_expert] == [1, 1, 2, 3, 4, 5, 6, 8]
    assert tiling_of(1 << 16, 128, CPU).kind == "many"


def test_warpgroups_multiply_where_the_gpu_has_them(monkeypatch):
    for has_them in (False, True):
        monkeypatch.setattr(tilings, "_has_warpgroups", lambda device, answer=has_them: answer)
        assert tiling_of(128 * 46, 128, CPU).kind == "many"
        assert tiling_of(128 * 47, 128, CPU) == (tilings.PIPED if has_them else MOST)


ARCHITECTURES = (
    "sm_90a",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_89", "sm_100a", "sm_120a")),
)
SCHEME = {"SCHEME": "16,0,0,0,0,0,0,2688,0,1,0", "DTYPE": 1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_files_compile_for(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path)
    tile = {"BLOCK": 16, "NT": 4, "MT": 8, "WARPS": 4, "STAGES": 3, "MIN_BLOCKS": 1}
    variants = {
        "few": tile | {"MT": 1, "WARPS": 8},
        "many": tile,
        "piped": tile | {"NT": 2, "MT": 16, "WARPS": 8, "STAGES": 8},
        "routes": {},
        "rows": SCHEME,
    }
    for library in kernels.FILES:
        source = library.program.source
        built = nvrtc.build(source, defines=variants[source.stem], architecture=architecture)
        assert built.code[:4] == b"\x7fELF"
