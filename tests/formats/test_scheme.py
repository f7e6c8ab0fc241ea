"""Schemes: stable digests, lookup, and the values that describe a layer."""

import dataclasses
import hashlib
import json

import pytest

from tracefp4.errors import ConfigError, FormatError, TraceFP4Error
from tracefp4.formats.block import MXFP4, NVFP4
from tracefp4.formats.order import Candidates, ErrorSum, Order, ScaleRule, Sign, Tie
from tracefp4.formats.precision import BF16_LAYER, LayerPrecision
from tracefp4.formats.schemes import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2, SCHEMES, scheme_by_name

# A digest is stored with records and checkpoints: a change here makes old ones unreadable and must be
# deliberate.
DIGESTS = {
    "NVFP4_ROW_POW2": "b9e6a4c4dd166a86",
    "NVFP4_TENSOR_POW2": "f0c7a46bfb90feea",
    "NVFP4_STATIC_POW2": "c4fada11425bb0f9",
    "NVFP4_KV": "3ef7d2af7a274ab9",
    "NVFP4_ROW_FP32": "0b5b9b8574a52346",
    "NVFP4_TENSOR_FP32": "e36fdb95eafb71d0",
    "MXFP4_FLOOR": "bd89a76471ff5fdd",
    "MXFP4_EVEN": "8b4ce5d2a4181fff",
    "MXFP4_RCEIL": "cdb8dc7d5c4f69e1",
    "MXFP4_CEIL": "a36fecaf0eb3d93e",
    "NVFP4_MODELOPT": "040013514d4c5680",
    "NVFP4_TORCHAO": "6352a692185ba492",
    "NVFP4_COMPRESSED_TENSORS": "7103d2bf7cf24cd0",
    "NVFP4_VLLM": "97442349e3b66dda",
    "NVFP4_STATIC_VLLM": "9eb8fcbef4d3d3db",
    "NVFP4_TRANSFORMER_ENGINE": "742bd1e057a31274",
    "NVFP4_ROW_TRANSFORMER_ENGINE": "1d206244e8abc8dc",
    "NVFP4_FOUROVERSIX": "fbcabe050c4e0fc8",
    "MXFP4_COMPRESSED_TENSORS": "808d1a77b3bf4981",
    "MXFP4_FOUROVERSIX": "7d1236ff658bb407",
    "MXFP4_MODELOPT": "790b224002031707",
    "NVFP4_ROW_POW2_4OVER6_MSE": "10806e9153afcc18",
    "NVFP4_ROW_POW2_4OVER6_MAE": "9fba46712c5a4fa2",
    "NVFP4_ROW_POW2_4OVER6_ABSMAX": "331acc0765bba9f4",
    "NVFP4_TENSOR_POW2_4OVER6_MSE": "3f3c7cca3ccff07e",
    "NVFP4_TENSOR_POW2_4OVER6_MAE": "d52a271984c8f32e",
    "NVFP4_TENSOR_POW2_4OVER6_ABSMAX": "e755d41ac96f6a43",
    "NVFP4_ROW_FP32_4OVER6_MSE": "03c3c9dffb2a50a0",
    "NVFP4_ROW_FP32_4OVER6_MAE": "4d3cd2f5cd3116cd",
    "NVFP4_ROW_FP32_4OVER6_ABSMAX": "55e8979f6c8ef6bc",
    "NVFP4_TENSOR_FP32_4OVER6_MSE": "d0202f54e2445644",
    "NVFP4_TENSOR_FP32_4OVER6_MAE": "f4955b62ca68f062",
    "NVFP4_TENSOR_FP32_4OVER6_ABSMAX": "3e300fde1836d0a4",
    "NVFP4_FOUROVERSIX_4OVER6_MSE": "239798d87c1569b9",
    "NVFP4_FOUROVERSIX_4OVER6_MAE": "3acb57f54a7e5bd0",
    "NVFP4_FOUROVERSIX_4OVER6_ABSMAX": "6386de78a7a0b94c",
    "NVFP4_TRANSFORMER_ENGINE_4OVER6_MSE": "8d06cde4b169a435",
    "NVFP4_TRANSFORMER_ENGINE_4OVER6_MAE": "7de7b3fa12c17c6f",
    "NVFP4_TRANSFORMER_ENGINE_256_4OVER6_MSE": "4e84db850e630202",
    "NVFP4_TRANSFORMER_ENGINE_256_4OVER6_MAE": "dd7f4e9d5da9e0a2",
}


def test_digests_are_stable_and_distinct():
    assert {name: scheme.digest for name, scheme in SCHEMES.items()} == DIGESTS
    assert len(set(DIGESTS.values())) == len(DIGESTS)


CHANGED = {
    "name": "OTHER",
    "outer": "static",
    "order": Order.TORCHAO,
    "scale_max": 256.0,
    "candidates": Candidates.MSE,
    "error_sum": ErrorSum.FOLDED,
    "zero_byte": 0x38,
    "underflow_byte": 0x00,
    "least_byte": 0x08,
    "tie": Tie.TOWARD_ZERO,
    "sign": Sign.ORDERED,
}
"""Of NVFP4_ROW_POW2, one field at a time; the others change together or not at all."""


@pytest.mark.parametrize("name", CHANGED)
def test_every_field_is_part_of_the_digest(name):
    assert dataclasses.replace(NVFP4_ROW_POW2, **{name: CHANGED[name]}).digest != NVFP4_ROW_POW2.digest


def test_the_digest_covers_every_field():
    text = json.dumps(
        {"limits": [-110, 116, 2.0**-116], "scheme": dataclasses.asdict(NVFP4_ROW_POW2)},
        sort_keys=True,
        separators=(",", ":"),
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == NVFP4_ROW_POW2.digest
    alone = {"block_format", "scale_rule", "nonfinite_rule"}
    assert {field.name for field in dataclasses.fields(NVFP4_ROW_POW2)} == alone | set(CHANGED)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"block_format": MXFP4}, "got MXFP4 in blocks of 32, POW2, rule E4M3, outer 'row'"),
        ({"order": Order.MX}, "got NVFP4 in blocks of 16, MX, rule E4M3, outer 'row'"),
        ({"outer": "none"}, "got NVFP4 in blocks of 16, POW2, rule E4M3, outer 'none'"),
        ({"scale_rule": ScaleRule.FLOOR}, "got NVFP4 in blocks of 16, POW2, rule FLOOR, outer 'row'"),
        ({"block_format": dataclasses.replace(NVFP4, block_size=32)}, "got NVFP4 in blocks of 32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_parts_that_do_not_belong_together_are_refused(changes, got):
    with pytest.raises(FormatError, match=rf"MXFP4 goes with order MX.*{got}.*Correct the four together"):
        dataclasses.replace(NVFP4_ROW_POW2, **changes)


@pytest.mark.parametrize(
    ("scheme", "name", "value"),
    [
        *[(MXFP4_FLOOR, name, CHANGED[name]) for name in ("scale_max", "candidates", "error_sum")],
        *[(MXFP4_FLOOR, name, CHANGED[name]) for name in ("zero_byte", "underflow_byte", "least_byte")],
        (NVFP4_KV, "scale_max", 256.0),
        (NVFP4_ROW_POW2, "nonfinite_rule", "other"),
    ],
)
def test_a_choice_that_would_change_no_byte_is_refused(scheme, name, value):
    with pytest.raises(FormatError, match=rf"{scheme.name}: {name} would change the digest and no byte; got"):
        dataclasses.replace(scheme, **{name: value})


def test_lookup_by_name():
    assert all(scheme_by_name(name) is scheme for name, scheme in SCHEMES.items())


def test_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"near: NVFP4_ROW_POW2, .*docs/schemes.md") as caught:
        scheme_by_name("nvfp4_row_pow")
    with pytest.raises(ConfigError, match="near: NVFP4_ROW_POW2, NVFP4_TENSOR_POW2"):
        scheme_by_name("NVFP4")
    with pytest.raises(ConfigError, match="Unknown scheme ''"):
        scheme_by_name("")
    assert isinstance(caught.value, TraceFP4Error) and isinstance(caught.value, ValueError)


def test_layer_precision_refuses_exponents_out_of_range():
    assert LayerPrecision(activation=None, weight=None, kv=None) == BF16_LAYER
    with pytest.raises(ConfigError, match=r"k_exponent must lie in \[-110, 116\]; got 117"):
        LayerPrecision(activation=None, weight=None, kv=NVFP4_KV, k_exponent=117)
