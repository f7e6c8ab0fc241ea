"""Schemes: stable digests, lookup, and the values that describe a layer."""

import dataclasses

import pytest

from tracefp4.errors import ConfigError, TraceFP4Error
from tracefp4.formats.block import MXFP4
from tracefp4.formats.precision import BF16_LAYER, LayerPrecision
from tracefp4.formats.scheme import NVFP4_KV, NVFP4_ROW_POW2, SCHEMES, scheme_by_name

# A digest is stored with records and checkpoints: a change here makes old ones unreadable and must be
# deliberate.
DIGESTS = {
    "NVFP4_ROW_POW2": "dc50ae1758f48442",
    "NVFP4_TENSOR_POW2": "aed9b55c250248b4",
    "NVFP4_KV": "21d99e0f1e733c22",
}


def test_digests_are_stable_and_distinct():
    assert {name: scheme.digest for name, scheme in SCHEMES.items()} == DIGESTS
    assert len(set(DIGESTS.values())) == len(DIGESTS)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(NVFP4_ROW_POW2)])
def test_every_field_is_part_of_the_digest(name):
    changed = {"block_format": MXFP4, "outer": "static"}.get(name, "changed")
    assert dataclasses.replace(NVFP4_ROW_POW2, **{name: changed}).digest != NVFP4_ROW_POW2.digest


def test_lookup_by_name():
    assert all(scheme_by_name(name) is scheme for name, scheme in SCHEMES.items())


def test_unknown_name_lists_all_and_the_nearest():
    with pytest.raises(ConfigError, match=r"NVFP4_TENSOR_POW2.*Did you mean 'NVFP4_ROW_POW2'") as caught:
        scheme_by_name("nvfp4_row_pow")
    assert isinstance(caught.value, TraceFP4Error) and isinstance(caught.value, ValueError)


def test_layer_precision_refuses_exponents_out_of_range():
    assert LayerPrecision(activation=None, weight=None, kv=None) == BF16_LAYER
    with pytest.raises(ConfigError, match=r"k_exponent must lie in \[-110, 116\]; got 117"):
        LayerPrecision(activation=None, weight=None, kv=NVFP4_KV, k_exponent=117)
