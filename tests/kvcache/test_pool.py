"""KVPool: what it stores per layer, how many bytes that is, and whole-page moves."""

import dataclasses

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import FP4_LAYER

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED, Arithmetic
from tracefp4.formats.fragments import FragmentPages
from tracefp4.formats.precision import BF16_LAYER
from tracefp4.formats.tensor import BlockTensor
from tracefp4.kvcache import CacheShape, KVPool
from tracefp4.kvcache.pool import frame_of
from tracefp4.ops.backend import Backend
from tracefp4.ops.kv_append import kv_append
from tracefp4.ops.kv_attention.reference import read_pages
from tracefp4.ops.quantize import quantize

SHAPE = CacheShape(num_kv_heads=2, head_dim=32, num_pages=3, page_size=4)


@pytest.fixture
def pool():
    pool = KVPool(SHAPE, precision=(FP4_LAYER, BF16_LAYER, FP4_LAYER), arithmetic=EMULATED)
    for store in pool._stores():
        store.copy_(torch.randint(0, 100, store.shape))
    return pool


def parts_of(pool, frame):
    parts = []
    for layer in pool.layers:
        for pages in (layer.keys, layer.values):
            is_fp4 = isinstance(pages, BlockTensor)
            parts += [pages.packed[:, frame], pages.block_scales[:, frame]] if is_fp4 else [pages[:, frame]]
    return [part.clone() for part in parts]


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)


def test_bytes_of_a_page_by_hand(pool):
    # 4 positions * 2 heads * K and V; FP4: 16 code bytes + 2 scale bytes per head; bf16: 64 bytes
    assert pool.page_bytes == 4 * 2 * 2 * (2 * (16 + 2) + 64)
    assert pool.num_bytes == 4 * pool.page_bytes


def test_memory_that_was_given_back_comes_again_as_zeros(pool):
    saved, (frame, *_) = pool.save(1), parts_of(pool, 1)
    assert frame.any()
    size, layers = pool.page_bytes, pool.layers
    pool.clear(2)
    pool.give_back()
    assert pool.num_bytes == 0 and pool.page_bytes == size and pool.layers == []
    pool.make_again()
    assert pool.num_bytes == 4 * size and not any(store.any() for store in pool._stores())
    assert [type(layer.keys) for layer in pool.layers] == [type(layer.keys) for layer in layers]
    assert int(pool.layers[0].keys.outer) == int(layers[0].keys.outer)
    pool.load(2, saved)
    assert_same(pool.save(2), saved)
    stores = pool._stores()
    pool.make_again()
    assert all(store is kept for store, kept in zip(pool._stores(), stores, strict=True))


def test_layers_hold_their_own_exponents_and_storage():
    layer = dataclasses.replace(FP4_LAYER, k_exponent=2, v_exponent=-5)
    pool = KVPool(SHAPE, precision=(BF16_LAYER, layer), arithmetic=EMULATED)
    assert pool.layers[0].keys.dtype == torch.bfloat16
    assert (int(pool.layers[1].keys.outer), int(pool.layers[1].values.outer)) == (2, -5)


def test_unrounded_values_are_stored_in_the_compute_dtype():
    exact = Arithmetic(name="exact", dtype="float32", emulates_bf16=False, rounds_probabilities=False)
    for arithmetic, dtype in ((exact, torch.float32), (CONTROL, torch.bfloat16), (EMULATED, torch.bfloat16)):
        assert KVPool(SHAPE, precision=(BF16_LAYER,), arithmetic=arithmetic).layers[0].values.dtype == dtype


def test_save_and_load_move_a_page_bit_for_bit(pool):
    before, others = parts_of(pool, 1), parts_of(pool, 2)
    saved = pool.save(1)
    pool.load(0, saved)
    assert_same(parts_of(pool, 0), before)
    assert_same(parts_of(pool, 2), others)


def test_saved_bytes_are_a_copy(pool):
    saved = pool.save(1)
    kept = [part.clone() for part in saved]
    pool.copy(2, 1)
    assert_same(saved, kept)


def test_copy_and_clear_touch_one_frame(pool):
    source, others = parts_of(pool, 0), parts_of(pool, 3)
    pool.copy(0, 2)
    assert_same(parts_of(pool, 2), source)
    pool.clear(2)
    pool.flush()
    for pages in (pool.layers[0].keys, pool.layers[2].values):
        assert (pages.scales()[:, 2] == 0).all()
    assert (pool.layers[1].keys[:, 2] == 0).all()
    assert_same(parts_of(pool, 0), source)
    assert_same(parts_of(pool, 3), others)


@pytest.mark.parametrize("act", ["load", "copy"])
def test_a_frame_that_was_to_be_cleared_keeps_what_it_is_given_next(pool, act):
    # Mutation: pages that were loaded or copied are cleared afterwards.
    source, frame = parts_of(pool, 0), 2
    saved = pool.save(0)
    for other in (frame, 1):
        pool.clear(other)
    pool.copy(0, frame) if act == "copy" else pool.load(frame, saved)
    pool.flush()
    assert_same(parts_of(pool, frame), source)
    for pages in (pool.layers[0].keys, pool.layers[2].values):
        assert (pages.scales()[:, 1] == 0).all()


def test_head_dims_without_whole_blocks_are_refused():
    shape = dataclasses.replace(SHAPE, head_dim=24)
    with pytest.raises(ConfigError, match="head_dim 24"):
        KVPool(shape, precision=(FP4_LAYER,), arithmetic=EMULATED)
    KVPool(shape, precision=(BF16_LAYER,), arithmetic=EMULATED)


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match="page_size"):
        dataclasses.replace(SHAPE, page_size=0)


def written(pool, layer, rows_TCD, *, slots):
    """Quantize K rows under the layer's scheme and exponent and append them."""
    pages = pool.layers[layer].keys
    num_tokens, num_heads = rows_TCD.shape[:2]
    exponent = int(pages.outer)
    rounded = quantize(rows_TCD.reshape(num_tokens, -1), scheme=pages.scheme, exponent=exponent)
    rows = BlockTensor(
        packed=rounded.packed.view(num_tokens, num_heads, -1),
        block_scales=rounded.block_scales.view(num_tokens, num_heads, -1),
        outer=pages.outer,
        scheme=pages.scheme,
    )
    for stored in (pages, pool.layers[layer].values):
        kv_append(stored, dataclasses.replace(rows, outer=stored.outer), slots=torch.tensor(slots))


def read(pages, frame, *, dtype=torch.float64):
    """Values of one frame, [C, S, D]."""
    return read_pages(pages, torch.tensor([[frame]]), dtype)[:, 0]


@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_kvq_1_every_block_scale_is_read_where_it_was_written(page_size):
    """head_dim 256, 16 blocks: block b of every token is 6 * (b + 1), so its scale is b + 1 and its codes are 7."""
    shape = CacheShape(num_kv_heads=2, head_dim=256, num_pages=4, page_size=page_size)
    layer = dataclasses.replace(FP4_LAYER, k_exponent=0, v_exponent=0)
    pool = KVPool(shape, precision=(layer,), arithmetic=EMULATED)
    ramp = 6.0 * torch.arange(1, 17, dtype=torch.float32).repeat_interleave(16)
    slots = [3 * page_size, page_size, 1, 0]
    written(pool, 0, ramp.expand(4, 2, 256).contiguous(), slots=slots)
    for pages in (pool.layers[0].keys, pool.layers[0].values):
        assert isinstance(pages, BlockTensor)
        for slot in slots:
            frame, offset = divmod(slot, page_size)
            assert torch.equal(read(pages, frame)[:, offset], ramp.double().expand(2, 256))
            assert set(pages.codes()[:, frame, offset].flatten().tolist()) == {7}
            scales = pages.scales()[:, frame, offset]
            assert scales.tolist() == [[float(b + 1) for b in range(16)]] * 2


def test_kvq_5_a_later_token_changes_no_stored_byte():
    layer = dataclasses.replace(FP4_LAYER, k_exponent=0, v_exponent=0)
    pool = KVPool(SHAPE, precision=(layer,), arithmetic=EMULATED)
    ramp = torch.arange(1, 33, dtype=torch.float32).div(torch.tensor(10.0)).expand(1, 2, 32).contiguous()
    written(pool, 0, ramp, slots=[0])
    keys = pool.layers[0].keys
    first = [part[:, 0, 0].clone() for part in (keys.packed, keys.block_scales)]
    for slot in (1, 2, 3, 4):  # the rest of the page, and the next one
        written(pool, 0, 1000 * ramp, slots=[slot])
    for part, expected in zip((keys.packed, keys.block_scales), first, strict=True):
        assert_bitwise(part[:, 0, 0], expected)
    assert not torch.equal(keys.block_scales[:, 0, 0], keys.block_scales[:, 0, 1])


def test_lif_3_layers_of_different_storage_read_back_their_own_rows():
    """bf16 and FP4 layers in turn: a store chosen by position in a list would give another layer's rows."""
    layer = dataclasses.replace(FP4_LAYER, k_exponent=0, v_exponent=0)
    pool = KVPool(SHAPE, precision=(BF16_LAYER, layer, BF16_LAYER, layer), arithmetic=EMULATED)
    for index, pages in enumerate(pool.layers):
        rows = torch.full((4, 2, 32), 6.0 * (index + 1))  # scale index + 1, code 7: exact
        if isinstance(pages.keys, BlockTensor):
            written(pool, index, rows, slots=[4, 5, 6, 7])
        else:
            for stored in (pages.keys, pages.values):
                kv_append(stored, rows.to(stored.dtype), slots=torch.tensor([4, 5, 6, 7]))
    for index, pages in enumerate(pool.layers):
        for stored in (pages.keys, pages.values):
            assert read(stored, 1).unique().tolist() == [6.0 * (index + 1)]
            assert read(stored, 0).unique().tolist() == [0.0]


def test_frames_in_fragment_order_hold_the_same_bytes(monkeypatch):
    shape = CacheShape(num_kv_heads=2, head_dim=64, num_pages=3, page_size=16)
    precision = (FP4_LAYER, BF16_LAYER, FP4_LAYER)
    plain = KVPool(shape, precision=precision, arithmetic=EMULATED)
    monkeypatch.setattr("tracefp4.kvcache.pool.choose", lambda op, device: Backend.CUDA)
    moved = KVPool(shape, precision=precision, arithmetic=EMULATED)
    assert isinstance(moved.layers[0].keys, FragmentPages) and isinstance(moved.layers[1].keys, torch.Tensor)
    small = KVPool(dataclasses.replace(shape, page_size=8), precision=precision, arithmetic=EMULATED)
    assert isinstance(small.layers[0].keys, BlockTensor)
    slots = [17, 3, 16, 40, 0]
    rows = torch.randn(5, 2, 64)
    for pool in (plain, moved):
        for layer in (0, 2):
            written(pool, layer, rows, slots=slots)
        pool.copy(1, 2)
        pool.load(1, pool.save(0))
        pool.clear(0)
        pool.flush()
    assert moved.num_bytes == plain.num_bytes
    for layer in (0, 2):
        for kind in ("keys", "values"):
            here, there = (getattr(pool.layers[layer], kind) for pool in (plain, moved))
            for frame in range(4):
                assert_bitwise(read(there, frame), read(here, frame))
                assert_bitwise(frame_of(there, frame).block_scales, frame_of(here, frame).block_scales)
                if frame:  # clearing leaves codes, under scales of 0
                    assert_bitwise(frame_of(there, frame).packed, frame_of(here, frame).packed)
