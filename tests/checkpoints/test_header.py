"""Headers: every kind of damage is refused, the layout is the one that other readers need."""

import json

import pytest
import torch

from tracefp4.checkpoints.container import ContainerReader
from tracefp4.checkpoints.header import DTYPES, TensorSpec, plan_header
from tracefp4.errors import FormatError


def _entry(dtype="U8", shape=(2,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _file(path, header, data=b"\x01\x02"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


TWO = {"a": _entry(), "b": _entry(offsets=(2, 4))}
FAULTS = {
    "empty": (b"", b"", "not JSON"),
    "not_json": (b"{'a': 1}", b"", "not JSON"),
    "not_utf8": (b'{"\xff": 1}', b"", "not JSON"),
    "deep": (b"[" * 200_000, b"", "not JSON"),
    "a_list": ([], b"", "not a JSON object"),
    "key_twice": (b'{"a": 1, "a": 2}', b"", "'a' twice"),
    "inner_key_twice": (
        b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [], "data_offsets": [0, 1]}}', b"1", "'dtype' twice",
    ),
    "no_offsets": ({"a": {"dtype": "U8", "shape": [2]}}, b"12", "entry a"),
    "extra_key": ({"a": {**_entry(), "more": 1}}, b"12", "entry a"),
    "negative": ({"a": _entry(shape=(-2,))}, b"12", "entry a"),
    "boolean_size": ({"a": _entry(shape=(True,), offsets=(0, 1))}, b"1", "entry a"),
    "fraction": ({"a": _entry(shape=(2.0,))}, b"12", "entry a"),
    "unknown_dtype": ({"a": _entry(dtype="F4")}, b"12", "'F4'"),
    "odd_dtype": ({"a": _entry(dtype=["U8"])}, b"12", "element type"),
    "three_offsets": ({"a": _entry(offsets=(0, 1, 2))}, b"12", "offsets are"),
    "shape_needs_more": ({"a": _entry(shape=(3,))}, b"12", "needs 3 bytes"),
    "backwards": ({"a": _entry(offsets=(2, 0))}, b"12", "offsets are"),
    "overlap": ({"a": _entry(), "b": _entry(offsets=(1, 3))}, b"123", "overlap"),
    "same_place": ({"a": _entry(), "b": _entry()}, b"12", "overlap"),
    "gap": ({"a": _entry(), "b": _entry(offsets=(3, 5))}, b"12345", "leave a gap"),
    "first_gap": ({"a": _entry(offsets=(1, 3))}, b"123", "leave a gap"),
    "truncated": (TWO, b"123", "truncated"),
    "too_long": (TWO, b"12345", "longer than its header"),
    "metadata_number": ({"__metadata__": {"step": 1}, "a": _entry()}, b"12", "__metadata__"),
    "metadata_list": ({"__metadata__": [], "a": _entry()}, b"12", "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_refused(fault, tmp_path):
    header, data, message = FAULTS[fault]
    with pytest.raises(FormatError, match=message) as raised:
        ContainerReader(_file(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in str(raised.value)


@pytest.mark.parametrize("length", [5, 10**8 + 1, 2**63])
def test_a_length_that_cannot_be_is_refused_before_it_is_read(length, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, match=f"claims {length} bytes"):
        ContainerReader(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_shorter_than_a_length_is_refused(size, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(FormatError, match=f"{size} bytes"):
        ContainerReader(path)


def test_every_cut_of_a_good_file_is_refused(tmp_path):
    whole = _file(tmp_path / "whole", TWO, b"1234")
    data = whole.read_bytes()
    with ContainerReader(whole) as reader:
        assert list(reader.specs) == ["a", "b"]
    for length in range(len(data)):
        cut = tmp_path / "cut"
        cut.write_bytes(data[:length])
        with pytest.raises(FormatError):
            ContainerReader(cut)


def test_wide_elements_come_first_and_lie_aligned():
    specs = [TensorSpec(name, dtype, (3,)) for name, dtype in DTYPES.items()]
    header, begins, length = plan_header(specs, metadata={"format": "pt"})
    assert len(header) % 8 == 0
    for spec in specs:
        assert begins[spec.name] % spec.dtype.itemsize == 0, spec
    assert length == len(header) + sum(spec.num_bytes for spec in specs)


@pytest.mark.parametrize(
    "specs, message",
    [
        ([TensorSpec("a", torch.uint8, ()), TensorSpec("a", torch.uint8, ())], "a twice"),
        ([TensorSpec("__metadata__", torch.uint8, ())], "__metadata__"),
        ([TensorSpec("a", torch.complex128, ())], "complex128"),
    ],
    ids=["twice", "reserved", "dtype"],
)
def test_what_no_file_can_hold_is_refused(specs, message):
    with pytest.raises(FormatError, match=message):
        plan_header(specs, metadata={})
