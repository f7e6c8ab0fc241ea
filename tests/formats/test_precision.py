"""The scheme digest covers every layer: two models that round anything otherwise have two digests."""

from dataclasses import replace

import pytest

from tracefp4.formats import BF16_LAYER, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, LayerPrecision
from tracefp4.formats.precision import scheme_digest

WHOLE = LayerPrecision(activation=NVFP4_ROW_POW2, weight=NVFP4_TENSOR_POW2, kv=NVFP4_KV)
CACHE = replace(WHOLE, activation=None, weight=None)
A, W, K = NVFP4_ROW_POW2.digest, NVFP4_TENSOR_POW2.digest, NVFP4_KV.digest


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((), "bf16-bf16-bf16"),
        ((BF16_LAYER, BF16_LAYER), "bf16-bf16-bf16"),
        ((WHOLE, WHOLE), f"{A}-{W}-{K}"),
        ((BF16_LAYER, WHOLE, BF16_LAYER), f"{A}-{W}-{K}"),
        ((replace(WHOLE, k_exponent=3), WHOLE), f"{A}-{W}-{K}"),
        ((CACHE, WHOLE, CACHE), f"bf16-bf16-{K}+{A}-{W}-{K}"),
        ((WHOLE, CACHE), f"{A}-{W}-{K}+bf16-bf16-{K}"),
    ],
    ids=["no layers", "bf16", "alike", "some bf16", "exponents", "experts kept first", "experts kept last"],
)
def test_every_combination_of_schemes_counts_once(layers, expected):
    # Mutations: only the first layer that is not bf16 counts; combinations are sorted.
    assert scheme_digest(layers) == expected
