"""The header of a safetensors file: which tensors lie where, checked against the file and against itself.

8 bytes hold the header's length N (little-endian), N bytes hold JSON: name -> {dtype, shape, data_offsets}, and
strings under `__metadata__`. Offsets count from the end of the header; the tensors tile the rest of the file
without gaps. Planning lays wide element types first, as the safetensors library does: a reader that views the
bytes in place needs every tensor to begin at a multiple of its element size. Never reads or writes a tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from tracefp4.errors import FormatError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Every element type that both the container and torch know, by its name in the header."""

# The library's own limit; a longer header is taken for a damaged length.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
_LENGTH_BYTES = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one stored tensor."""

    name: str
    """Name in the file, e.g. `model.norm.weight`."""
    dtype: torch.dtype
    """One of `DTYPES`."""
    shape: tuple[int, ...]
    """Sizes, outermost first; () is one element."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    metadata: dict[str, str]
    """The file's own strings, e.g. {"format": "pt"}."""
    specs: dict[str, TensorSpec]
    """Every tensor by name, in the order of the bytes."""
    begins: dict[str, int]
    """First byte of every tensor, counted from the start of the file."""
    file_bytes: int
    """Length of the whole file."""


def read_header(file: int, path: Path) -> Header:
    """Parse and check the header of an open file.

    Args:
        file: descriptor; its position is not used.
        path: named in errors.

    Raises:
        FormatError: not a safetensors file, truncated, or a header that contradicts itself or the file's length.
    """
    content, begin, file_bytes = _parsed(file, path)
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        damaged(path, f"its {METADATA} is not an object of strings")
    entries = [_entry(path, name, value) for name, value in content.items()]
    # an empty tensor sorts before the one that begins where it lies
    entries.sort(key=lambda entry: entry[1:])
    position = 0
    for spec, start, stop in entries:
        if start != position:
            fault = "overlap" if start < position else "leave a gap"
            damaged(
                path, f"its tensors {fault}: {spec.name} begins at {start}, {position} bytes are described"
            )
        position = stop
    if position != file_bytes - begin:
        fault = "truncated" if position > file_bytes - begin else "longer than its header says"
        damaged(
            path, f"it is {fault}: {file_bytes - begin} bytes of tensors, the header describes {position}"
        )
    return Header(
        metadata=dict(metadata),
        specs={spec.name: spec for spec, _, _ in entries},
        begins={spec.name: begin + start for spec, start, _ in entries},
        file_bytes=file_bytes,
    )


def plan_header(
    specs: Sequence[TensorSpec], *, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Lay out a file: the header's bytes, the first byte of every tensor in the file, the file's length.

    Raises:
        FormatError: a name twice, a reserved name, or an element type that the container does not have.
    """
    names = [spec.name for spec in specs]
    odd = [spec for spec in specs if spec.dtype not in _NAMES or spec.name == METADATA]
    if odd or len(set(names)) != len(names):
        fault = f"{odd[0].name} of {odd[0].dtype}" if odd else f"{max(names, key=names.count)} twice"
        raise FormatError(
            f"A safetensors file cannot hold {fault}. Names are unique, not {METADATA}, and element types are "
            f"{', '.join(DTYPES)}. Rename or convert the tensor."
        )
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    places, position = {}, 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        stop = position + spec.num_bytes
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, stop],
        }
        places[spec.name] = position
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # spaces up to a multiple of 8, so that 8-byte elements are aligned in the file
    text += b" " * (-len(text) % _LENGTH_BYTES)
    begin = _LENGTH_BYTES + len(text)
    placed = {name: begin + place for name, place in places.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, placed, begin + position


def damaged(path: Path, fault: str) -> NoReturn:
    """Raise the FormatError of a file that is not a whole container; `fault` is a clause about it."""
    raise FormatError(
        f"{path} is not a whole safetensors file: {fault}. A file is a header that describes every byte after it. "
        "Copy or download the file again, or write it again."
    )


def _parsed(file: int, path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header's JSON object, where the data begins, and the length of the file."""
    file_bytes = os.fstat(file).st_size
    if file_bytes < _LENGTH_BYTES:
        damaged(path, f"it has {file_bytes} bytes, fewer than the {_LENGTH_BYTES} of a header's length")
    length = int.from_bytes(os.pread(file, _LENGTH_BYTES, 0), "little")
    begin = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or begin > file_bytes:
        damaged(
            path,
            f"its header claims {length} bytes, the file has {file_bytes} (limit {MAX_HEADER_BYTES})",
        )
    try:
        content = json.loads(os.pread(file, length, _LENGTH_BYTES), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        damaged(path, f"its header is not JSON with unique keys ({error})")
    if not isinstance(content, dict):
        damaged(path, "its header is not a JSON object")
    return content, begin, file_bytes


def _entry(path: Path, name: str, value: Any) -> tuple[TensorSpec, int, int]:
    """Check one header entry by itself: (spec, first byte, end) relative to the data."""
    is_entry = isinstance(value, dict) and set(value) == {"dtype", "shape", "data_offsets"}
    if not is_entry or not _are_counts(value["shape"]) or not _are_counts(value["data_offsets"]):
        damaged(path, f"its entry {name} is not {{dtype, shape, data_offsets}} of non-negative integers")
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        damaged(path, f"{name} has the element type {value['dtype']!r}; known: {', '.join(DTYPES)}")
    spec = TensorSpec(name, DTYPES[value["dtype"]], tuple(value["shape"]))
    offsets = value["data_offsets"]
    if len(offsets) != 2 or offsets[1] - offsets[0] != spec.num_bytes:
        damaged(
            path, f"{name} of {spec.dtype} {spec.shape} needs {spec.num_bytes} bytes, offsets are {offsets}"
        )
    return spec, offsets[0], offsets[1]


def _are_counts(value: Any) -> bool:
    # bool is an int in Python, not in a header
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a JSON object with a key twice: two readers could take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{max(keys, key=keys.count)!r} twice")
    return found
