"""tracefp4.json: what is written comes back, and what cannot be meant is refused."""

import json
from dataclasses import replace

import pytest

from tracefp4.checkpoints.layouts import Precision
from tracefp4.checkpoints.metadata import METADATA_FILE, Metadata, StaticScales, read_metadata
from tracefp4.errors import FormatError
from tracefp4.formats import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_STATIC_POW2, NVFP4_TENSOR_POW2

KNOWN = Metadata(
    layout="modelopt",
    precision=Precision(weight=NVFP4_TENSOR_POW2, activation=NVFP4_STATIC_POW2),
    method="nearest",
    calibration="0" * 16,
    cache=StaticScales(scheme=NVFP4_KV, exponents={10: (-110, 116), 2: (0, -3)}),
    modules={"a": {"relative_error": 0.5}},
    origin={"layout": "x"},
)


@pytest.mark.parametrize(
    "cache", [KNOWN.cache, StaticScales(scheme=None), None], ids=["exponents", "bf16", "unknown"]
)
def test_what_is_written_comes_back(cache, tmp_path):
    # Mutation: a cache in bf16 reads back as unknown.
    known = replace(KNOWN, cache=cache)
    (tmp_path / METADATA_FILE).write_bytes(known.to_bytes())
    found = read_metadata(tmp_path)
    assert found == known and found.to_bytes() == known.to_bytes()
    assert ("cache" in json.loads(known.to_bytes())) == (cache is not None)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"scheme": None, "exponents": {"0": [1, 2]}}, "static scheme with exponents, or neither"),
        ({"scheme": NVFP4_KV, "exponents": {}}, "static scheme with exponents, or neither"),
        ({"scheme": NVFP4_ROW_POW2, "exponents": {"0": [1, 2]}}, "static scheme with exponents, or neither"),
        ({"scheme": NVFP4_KV, "exponents": {"0": [1, 117]}}, "lie in"),
        ({"scheme": NVFP4_KV, "exponents": {"0": [-111, 1]}}, "lie in"),
        ({"scheme": NVFP4_KV, "exponents": {"0": [1]}}, "cannot be read"),
        ({"scheme": NVFP4_KV, "exponents": {"first": [1, 2]}}, "cannot be read"),
        ({"scheme": NVFP4_KV}, "cannot be read"),
    ],
)
def test_a_cache_that_cannot_be_meant_is_refused(cache, message, tmp_path):
    scheme = cache["scheme"]
    named = None if scheme is None else {"scheme": scheme.name, "digest": scheme.digest}
    content = json.loads(KNOWN.to_bytes()) | {"cache": {**cache, "scheme": named}}
    (tmp_path / METADATA_FILE).write_text(json.dumps(content))
    with pytest.raises(FormatError, match=message):
        read_metadata(tmp_path)


def test_a_cache_under_rules_that_changed_is_refused(tmp_path):
    content = json.loads(KNOWN.to_bytes())
    content["cache"]["scheme"]["digest"] = "0" * 16
    (tmp_path / METADATA_FILE).write_text(json.dumps(content))
    with pytest.raises(FormatError, match="NVFP4_KV has digest 0000000000000000; here it is"):
        read_metadata(tmp_path)
