"""The GPU kernel of kv_attention against float64: any order of threads, ragged batches, prefill, other batch-mates."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats.fragments import from_fragments, to_fragments
from tracefp4.formats.schemes import NVFP4_KV
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.kv_attention import device as attention_device
from tracefp4.ops.kv_attention import kv_attention
from tracefp4.ops.kv_attention.device import (
    EXACT,
    ROUNDED,
    Case,
    Where,
    attend_on_device,
    differences,
    error_of,
    is_covered,
    sample_pages,
)
from tracefp4.ops.kv_attention.reference import read_pages
from tracefp4.ops.pages import LayerPages

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
# Without rounding: queries and probabilities in parts of 22 bits or more, sums and exponentials in float32, so that an
# error of 2^-24 of a sum of magnitudes below 2^5 goes into every probability.


@pytest.fixture(params=[0, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(attention_device.LIBRARY, "runner", emulator)
    return emulator


def case(*, is_fp4=True, head_dim=64, heads=16, dtype=torch.bfloat16, positions, num_pages=6):
    generator = torch.Generator().manual_seed(1)
    pages = sample_pages(generator, is_fp4=is_fp4, head_dim=head_dim, num_frames=2 * num_pages)
    positions = torch.tensor(positions)
    queries = torch.randn(*positions.shape, heads, head_dim, generator=generator)
    # a query per head that fp16 does not hold
    queries[..., 0, :] *= 2.0**-30
    table = torch.stack([torch.randperm(2 * num_pages, generator=generator)[:num_pages] for _ in positions])
    return queries.to(dtype), pages, Where(page_table=table, positions=positions)


def attended(queries, pages, where, *, rounds=True, **kwargs):
    return attend_on_device(queries, pages, **where, rounds_probabilities=rounds, **kwargs)


@needs_compiler
@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_decoding_equals_float64_attention(emulator, is_fp4):
    queries, pages, where = case(is_fp4=is_fp4, positions=[[0], [15], [16], [95], [70]])
    found = attended(queries, pages[0], where)
    assert found.shape == queries.shape and found.dtype == torch.bfloat16
    assert error_of(found, queries, pages, where) < ROUNDED
    assert emulator.launches == {"attend": 1}
    # the first token sees itself alone, and its V is a bf16 number
    alone = read_pages(pages[0].values, where["page_table"][:1, :1], torch.float32)[:, 0, 0]
    assert torch.equal(found[0, 0].float(), alone.repeat_interleave(8, 0))


def alone_in_its_page(token):
    """V pages whose one token that is not 0 holds every code under every finite scale."""
    scales = torch.tensor([s for s in range(256) if s % 128 != 127] + [0, 0], dtype=torch.uint8).view(64, 4)
    packed, block_scales = torch.zeros(1, 64, 16, 32, dtype=torch.uint8), torch.zeros(1, 64, 16, 4).byte()
    packed[0, :, token] = (torch.arange(8) * 0x22 + 0x10).byte().repeat(4)  # 0, 1; 2, 3; ...
    block_scales[0, :, token] = scales
    outer = torch.tensor(-3, dtype=torch.int8)
    return BlockTensor(packed=packed, block_scales=block_scales, outer=outer, scheme=NVFP4_KV)


@needs_compiler
@pytest.mark.parametrize("token", [0, 9])
def test_every_code_under_every_scale(emulator, token):
    values = alone_in_its_page(token)
    keys = replace(values, packed=torch.zeros_like(values.packed))  # so that all 16 tokens weigh the same
    pages = LayerPages(keys=to_fragments(keys, "k"), values=to_fragments(values, "v"))
    where = Where(page_table=torch.arange(64)[:, None], positions=torch.full((64, 1), 15))
    found = attended(torch.ones(64, 1, 1, 64), pages, where, rounds=False)
    exact = read_pages(values, torch.arange(64)[:, None], torch.float32)[0, :, token]
    assert exact.unique().numel() == 475
    assert torch.equal(found[:, 0, 0] * 16, exact)


@needs_compiler
@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_float32_queries_without_rounding(emulator, is_fp4):
    queries, pages, where = case(is_fp4=is_fp4, heads=6, dtype=torch.float32, positions=[[37], [90]])
    found = attended(queries, pages[0], where, rounds=False)
    assert found.dtype == torch.float32
    assert error_of(found, queries, pages, where) < EXACT


@pytest.fixture
def small_splits(monkeypatch):
    """Eight tiles a split, two for each warp."""
    monkeypatch.setattr(attention_device, "SPLIT_TOKENS", dict.fromkeys(attention_device.SPLIT_TOKENS, 128))


@needs_compiler
@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_splits_prefill_and_batches_change_no_bit(emulator, small_splits, is_fp4):
    positions = [[390, 391, 392, 3, 127, 128], [7, 8, 9, 10, 11, 12]]
    queries, pages, where = case(is_fp4=is_fp4, heads=4, positions=positions, num_pages=25)
    whole = attended(queries, pages[0], where, enough_blocks=1)  # one block takes all four splits
    assert error_of(whole, queries, pages, where) < ROUNDED
    assert emulator.launches == {"attend": 1}
    for enough_blocks in (1000, 8):  # one each; two each
        assert_bitwise(attended(queries, pages[0], where, enough_blocks=enough_blocks), whole)
    assert emulator.launches == {"attend": 3, "combine": 2}
    for b, i in ((0, 0), (0, 3), (0, 4), (1, 2)):
        alone = Where(
            page_table=where["page_table"][b : b + 1], positions=where["positions"][b : b + 1, i : i + 1]
        )
        found = attended(queries[b : b + 1, i : i + 1], pages[0], alone)
        assert_bitwise(found, whole[b : b + 1, i : i + 1])


@needs_compiler
def test_what_is_not_seen_changes_no_bit(emulator):
    queries, pages, where = case(positions=[[37]], heads=2)
    before = attended(queries, pages[0], where)
    frames = where["page_table"][0]
    for part in (pages[0].keys, pages[0].values):
        part.block_scales[:, frames[3:]] = 0x7F  # NaN: in pages that nobody reads
        others = sorted(set(range(12)) - set(frames[:3].tolist()))
        part.packed[:, others] = 0x77
    assert_bitwise(attended(queries, pages[0], where), before)
    pages[0].keys.block_scales[1, frames[0]] = 0x7F
    after = attended(queries, pages[0], where)
    assert bool(after[:, :, 1].isnan().all())  # the kv head that holds it
    assert_bitwise(after[:, :, :1], before[:, :, :1])


@needs_compiler
def test_nan_in_a_split_reaches_only_those_who_see_it(emulator, small_splits):
    queries, pages, where = case(positions=[[37, 130]], heads=2, num_pages=9)
    before = attended(queries, pages[0], where, enough_blocks=1)
    pages[0].values.block_scales[:, where["page_table"][0, -1]] = 0x7F
    after = attended(queries, pages[0], where, enough_blocks=1)
    assert_bitwise(after[:, 0], before[:, 0])
    assert bool(after[:, 1].isnan().all())
    pages[0].keys.block_scales[:, where["page_table"][0, :-1]] = 0x7F  # all scores of a split
    assert bool(attended(queries, pages[0], where).isnan().all())


@needs_compiler
@pytest.mark.parametrize("exponent", [-100, 60, 100])
def test_queries_far_outside_of_fp16(emulator, exponent):
    queries, pages, where = case(positions=[[37], [3]], heads=2)
    before = attended(queries, pages[0], where)
    keys = pages[0].keys
    moved = replace(keys, outer=(keys.outer - exponent).to(torch.int8))
    found = attended(queries * 2.0**exponent, LayerPages(keys=moved, values=pages[0].values), where)
    assert_bitwise(found, before)


@needs_compiler
def test_nothing_to_attend_for(emulator):
    queries, pages, where = case(positions=[[1]])
    none = Where(page_table=where["page_table"][:0], positions=where["positions"][:0])
    assert attended(queries[:0], pages[0], none).shape == (0, 1, 16, 64)
    assert (
        attended(
            queries[:, :0],
            pages[0],
            Where(page_table=where["page_table"], positions=where["positions"][:, :0]),
        ).numel()
        == 0
    )
    assert emulator.launches == {}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
def test_every_shape(monkeypatch, is_fp4, head_dim, group):
    """Every pair of head size and group; the dtypes of the queries take turns."""
    dtype = (torch.bfloat16, torch.float16, torch.float32)[(head_dim // 64 + group) % 3]
    monkeypatch.setattr(attention_device.LIBRARY, "runner", Emulator(2))
    sizes = {"is_fp4": is_fp4, "head_dim": head_dim, "heads": 2 * group, "dtype": dtype}
    queries, pages, where = case(**sizes, positions=[[5], [47]], num_pages=3)
    for rounds in (True, False):
        found = attended(queries, pages[0], where, rounds=rounds)
        rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
        assert error_of(found, queries, pages, where) < (ROUNDED if rounds else EXACT + rounding)
    queries, pages, where = case(**sizes, positions=[list(range(3, 8))], num_pages=1)
    assert error_of(attended(queries, pages[0], where), queries, pages, where) < ROUNDED


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("is_fp4", [True, False], ids=["fp4", "bf16"])
@pytest.mark.parametrize(
    ("dtype", "rounds"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)]
)
def test_the_self_check_passes(monkeypatch, is_fp4, dtype, rounds):
    monkeypatch.setattr(attention_device.LIBRARY, "runner", Emulator())
    assert differences(torch.device("cpu"), Case(dtype, 128, is_fp4, rounds, 1)) is None


def test_operands_that_the_kernels_do_not_take(monkeypatch):
    queries, pages, where = case(positions=[[1]])
    assert is_covered(queries, pages[0])
    plain = from_fragments(pages[0].keys)
    small = torch.zeros(2, 3, 8, 64).bfloat16()
    for q, k, v in (
        (queries.double(), pages[0].keys, pages[0].values),
        (queries, plain, plain),
        (queries, pages[0].keys, small),
        (queries, small, small),
        (queries, small.view(2, 3, 16, 32), small.view(2, 3, 16, 32)),
        (queries, torch.zeros(2, 3, 16, 320).bfloat16(), torch.zeros(2, 3, 16, 320).bfloat16()),
        (queries, small.view(2, 3, 8, 64).float(), small.float()),
    ):
        assert not is_covered(q, LayerPages(keys=k, values=v))
    monkeypatch.setattr("tracefp4.ops.kv_attention.choose", lambda *asked: Backend.CUDA)
    arguments = {**where, "rounds_probabilities": True}
    mixed = LayerPages(keys=plain, values=plain)
    found = kv_attention(queries, mixed, **arguments)
    assert_bitwise(found, kv_attention(queries, mixed, **arguments, backend=Backend.REFERENCE))
    with pytest.raises(
        BackendError, match="pages BlockTensor, BlockTensor. Its kernels take queries in bf16"
    ):
        kv_attention(queries, mixed, **arguments, backend=Backend.CUDA)
    with pytest.raises(FormatError, match="int64"):
        kv_attention(queries, mixed, **{**arguments, "positions": where["positions"].int()})


def test_the_reference_reads_fragments_as_it_reads_plain_pages():
    queries, pages, where = case(positions=[[1], [90]])
    plain = LayerPages(keys=from_fragments(pages[0].keys), values=from_fragments(pages[0].values))
    arguments = {**where, "rounds_probabilities": True}
    assert_bitwise(kv_attention(queries, pages[0], **arguments), kv_attention(queries, plain, **arguments))


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    defines = Case(torch.bfloat16, 128, architecture != "sm_120a", rounds=True, tiles=1).defines
    source = attention_device.LIBRARY.program.source
    assert nvrtc.build(source, defines=defines, architecture=architecture).code[:4] == b"\x7fELF"


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_variant_compiles(head_dim, dtype):
    for tiles in (1,) if dtype == torch.float32 else (1, 2, 4) if head_dim == 64 else (1, 2):
        for is_fp4 in (True, False):
            defines = Case(dtype, head_dim, is_fp4, dtype == torch.bfloat16, tiles).defines
            assert attention_device._shared(defines) <= 227 << 10
            source = attention_device.LIBRARY.program.source
            assert nvrtc.build(source, defines=defines, architecture="sm_90a").code[:4] == b"\x7fELF"
