"""Parts of a tensor: cut between blocks, quantized to the bytes of the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.assertions import assert_bitwise

from tracefp4.errors import FormatError
from tracefp4.formats import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.schemes import SCHEMES
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.qat import parts
from tracefp4.qat.parts import block_spans, quantize_part

# one scheme of every order of operations, outer scale, block scale rule and choice of scales
CHOSEN = {(s.order, s.outer, s.scale_rule, s.candidates): s for s in SCHEMES.values()}.values()


def join_on_ranks(monkeypatch, x, scheme, split, cuts, exponent=None):
    """Quantize parts of x as ranks would: their maxima first, then each part under the largest."""
    dim = {"rows": -2, "columns": -1, "matrices": 0}[split]
    pieces = x.split(cuts, dim)
    maxima = []
    monkeypatch.setattr(parts, "largest_of_ranks", lambda values, group: maxima.append(values) or values)
    options = {"scheme": scheme, "split": split, "group": None, "exponent": exponent}
    for piece in pieces:
        quantize_part(piece, **options)
    if maxima:
        joined = torch.stack(maxima).amax(0)
        monkeypatch.setattr(parts, "largest_of_ranks", lambda values, group: joined)
    return [quantize_part(piece, **options) for piece in pieces], dim


def example(seed=0):
    """Two matrices [2, 6, 96] whose maxima sit in one part; a row of zeros, NaN and infinity."""
    x = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(seed))
    x[:, 4, 3] = 700.0
    x[0, 1, 70] = -90.0
    x[1, 2] = 0.0
    x[1, 3, 20], x[0, 0, 95] = torch.nan, torch.inf
    return x


@pytest.mark.parametrize(
    ("split", "cuts"),
    [("rows", [4, 2]), ("columns", [64, 32]), ("columns", [32, 32, 32]), ("matrices", [1, 1])],
)
@pytest.mark.parametrize("scheme", CHOSEN, ids=lambda s: s.name)
def test_dst_1_dst_3_parts_have_the_bytes_of_the_whole(monkeypatch, scheme, split, cuts):
    # Mutations: a part's own maximum; a mean of maxima; the row's maximum where the matrix's is needed.
    x, exponent = example(), -3 if scheme.outer == "static" else None
    whole = quantize(x, scheme=scheme, exponent=exponent)
    found, dim = join_on_ranks(monkeypatch, x, scheme, split, cuts, exponent)
    assert_bitwise(torch.cat([part.packed for part in found], dim), whole.packed)
    assert_bitwise(torch.cat([part.block_scales for part in found], dim), whole.block_scales)
    outer = [part.outer for part in found]
    has_part = (scheme.outer == "row" and split != "columns") or (
        scheme.outer == "tensor" and split == "matrices"
    )
    if has_part:
        assert_bitwise(torch.cat(outer, -1 if split == "rows" else 0), whole.outer)
    else:
        assert all(torch.equal(part, whole.outer) for part in outer)


@pytest.mark.parametrize(("scheme", "split"), [(NVFP4_ROW_POW2, "columns"), (NVFP4_TENSOR_POW2, "rows")])
def test_a_part_by_itself_has_other_bytes(scheme, split):
    # What the all-reduced maximum is for; and what a cut inside a block would do.
    x = example()
    dim = {"rows": -2, "columns": -1}[split]
    first = x.narrow(dim, 0, 4 if split == "rows" else 64)
    whole = quantize(x, scheme=scheme).block_scales.narrow(dim, 0, 4)
    assert not torch.equal(quantize(first, scheme=scheme).block_scales, whole)


def test_kv_heads_on_several_ranks_have_the_bytes_of_the_cache():
    # Two heads of 32: one static outer scale per layer, so a rank with one head needs nothing from the other.
    keys = torch.randn(7, 64)
    whole = quantize(keys, scheme=NVFP4_KV, exponent=-4)
    for head in range(2):
        mine = quantize_part(
            keys[:, 32 * head : 32 * head + 32], scheme=NVFP4_KV, split="columns", group=None, exponent=-4
        )
        assert_bitwise(mine.packed, whole.packed[:, 16 * head : 16 * head + 16])
        assert_bitwise(mine.block_scales, whole.block_scales[:, 2 * head : 2 * head + 2])


def test_dst_1_blocks_are_cut_between():
    # 464 columns are 29 blocks.
    assert block_spans(464, 4) == [(0, 128), (128, 240), (240, 352), (352, 464)]
    assert block_spans(464, 29, needs_equal=True) == [(first, first + 16) for first in range(0, 464, 16)]
    with pytest.raises(FormatError, match=r"29 blocks of 16.*116 columns.*\[1, 29\]"):
        block_spans(464, 4, needs_equal=True)
    for width, num_parts in ((100, 2), (0, 1), (64, 5), (64, 0)):
        with pytest.raises(FormatError, match=f"width of {width} cannot be cut into {num_parts}"):
            block_spans(width, num_parts)


def test_dst_1_dequantized_parts_joined_are_the_whole(monkeypatch):
    x = torch.randn(3, 464)
    cuts = [last - first for first, last in block_spans(464, 4)]
    found, _ = join_on_ranks(monkeypatch, x, NVFP4_ROW_POW2, "columns", cuts)
    joined = torch.cat([dequantize(part) for part in found], -1)
    assert_bitwise(joined, dequantize(quantize(x, scheme=NVFP4_ROW_POW2)))


@given(blocks=st.integers(1, 60), num_parts=st.integers(1, 60), block_size=st.sampled_from([16, 32]))
def test_spans_cover_whole_blocks_evenly(blocks, num_parts, block_size):
    if num_parts > blocks:
        with pytest.raises(FormatError):
            block_spans(blocks * block_size, num_parts, block_size=block_size)
        return
    spans = block_spans(blocks * block_size, num_parts, block_size=block_size)
    assert spans[0][0] == 0 and spans[-1][1] == blocks * block_size and len(spans) == num_parts
    assert all(first[1] == second[0] for first, second in pairwise(spans))
    widths = [last - first for first, last in spans]
    assert all(width > 0 and width % block_size == 0 for width in widths)
    assert max(widths) - min(widths) <= block_size


@pytest.mark.parametrize(("shape", "split"), [((4, 24), "columns"), ((16,), "rows"), ((4, 32), "experts")])
def test_parts_that_are_not_whole_blocks_are_refused(shape, split):
    with pytest.raises(FormatError, match="whole blocks of 16"):
        quantize_part(torch.zeros(shape), scheme=NVFP4_ROW_POW2, split=split, group=None)
