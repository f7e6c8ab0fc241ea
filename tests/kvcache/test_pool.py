"""KVPool: what it stores per layer, how many bytes that is, and whole-page moves."""

import dataclasses

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import FP4_LAYER

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED, Arithmetic
from tracefp4.formats.precision import BF16_LAYER
from tracefp4.formats.tensor import BlockTensor
from tracefp4.kvcache import CacheShape, KVPool

SHAPE = CacheShape(num_kv_heads=2, head_dim=32, num_pages=3, page_size=4)


@pytest.fixture
def pool():
    pool = KVPool(SHAPE, precision=(FP4_LAYER, BF16_LAYER, FP4_LAYER), arithmetic=EMULATED)
    for store in pool._stores():
        store.copy_(torch.randint(0, 100, store.shape))
    return pool


def frame_of(pool, frame):
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


def test_layers_hold_their_own_exponents_and_storage():
    layer = dataclasses.replace(FP4_LAYER, k_exponent=2, v_exponent=-5)
    pool = KVPool(SHAPE, precision=(BF16_LAYER, layer), arithmetic=EMULATED)
    assert pool.layers[0].keys.dtype == torch.bfloat16
    assert (int(pool.layers[1].keys.exponent), int(pool.layers[1].values.exponent)) == (2, -5)


def test_unrounded_values_are_stored_in_the_compute_dtype():
    exact = Arithmetic(name="exact", dtype="float32", emulates_bf16=False, rounds_probabilities=False)
    for arithmetic, dtype in ((exact, torch.float32), (CONTROL, torch.bfloat16), (EMULATED, torch.bfloat16)):
        assert KVPool(SHAPE, precision=(BF16_LAYER,), arithmetic=arithmetic).layers[0].values.dtype == dtype


def test_save_and_load_move_a_page_bit_for_bit(pool):
    before, others = frame_of(pool, 1), frame_of(pool, 2)
    saved = pool.save(1)
    pool.load(0, saved)
    assert_same(frame_of(pool, 0), before)
    assert_same(frame_of(pool, 2), others)


def test_saved_bytes_are_a_copy(pool):
    saved = pool.save(1)
    kept = [part.clone() for part in saved]
    pool.copy(2, 1)
    assert_same(saved, kept)


def test_copy_and_clear_touch_one_frame(pool):
    source, others = frame_of(pool, 0), frame_of(pool, 3)
    pool.copy(0, 2)
    assert_same(frame_of(pool, 2), source)
    pool.clear(2)
    for pages in (pool.layers[0].keys, pool.layers[2].values):
        assert (pages.scales()[:, 2] == 0).all()
    assert (pool.layers[1].keys[:, 2] == 0).all()
    assert_same(frame_of(pool, 0), source)
    assert_same(frame_of(pool, 3), others)


def test_head_dims_without_whole_blocks_are_refused():
    shape = dataclasses.replace(SHAPE, head_dim=24)
    with pytest.raises(ConfigError, match="head_dim 24"):
        KVPool(shape, precision=(FP4_LAYER,), arithmetic=EMULATED)
    KVPool(shape, precision=(BF16_LAYER,), arithmetic=EMULATED)


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match="page_size"):
        dataclasses.replace(SHAPE, page_size=0)
