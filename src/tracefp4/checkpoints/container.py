"""The safetensors container with bounded memory: read a tensor or some of its rows, write a file tensor by tensor.

The safetensors library writes a file from tensors that are all in memory, and reads by mapping the file, whose
pages count as resident. For a file of eight 64 MiB tensors, visited one after the other, the peak of resident
memory grew by 512 MiB with the library, writing and reading alike, and by 64 MiB with this module, which moves
bytes between the file and one tensor (preadv, pwrite). The files are the same: either reads what the other wrote.
Never knows what a tensor means.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

from tracefp4.checkpoints.header import TensorSpec, damaged, plan_header, read_header
from tracefp4.errors import FormatError


class ContainerReader:
    """An open safetensors file whose header has been checked; tensors are read on demand, as fresh copies.

    Args:
        path: the file.

    Raises:
        FormatError: not a safetensors file, truncated, or a header that contradicts itself or the file's length.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = read_header(self._file, self.path)
        except BaseException:
            os.close(self._file)
            raise
        self.metadata = header.metadata
        """The file's own strings, e.g. {"format": "pt"}."""
        self.specs = header.specs
        """Every tensor by name, in the order of the bytes."""
        self._begins = header.begins

    def read(self, name: str) -> Tensor:
        """Return one tensor, freshly allocated. Raises: FormatError for an unknown name or a file cut meanwhile."""
        spec = self._spec(name)
        return self._read(spec.shape, spec.dtype, self._begins[name])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (exclusive) of dimension 0: [stop - start, ...], freshly allocated.

        Raises:
            FormatError: unknown name, a tensor without rows, or a range outside 0..shape[0].
        """
        spec = self._spec(name)
        if not spec.shape or not 0 <= start <= stop <= spec.shape[0]:
            raise FormatError(
                f"{self.path}: rows {start}:{stop} of {name} refused; its shape is {spec.shape}. Rows lie in "
                "0..shape[0], start <= stop. Ask for rows that exist."
            )
        row_bytes = spec.num_bytes // spec.shape[0] if spec.shape[0] else 0
        shape = (stop - start, *spec.shape[1:])
        return self._read(shape, spec.dtype, self._begins[name] + start * row_bytes)

    def close(self) -> None:
        """Close the file; reading afterwards is a mistake."""
        os.close(self._file)

    def __enter__(self) -> ContainerReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.specs:
            raise FormatError(
                f"{self.path} holds no tensor {name!r}; it holds {len(self.specs)} others, "
                f"{', '.join(list(self.specs)[:3])} among them. Ask for one of `specs`."
            )
        return self.specs[name]

    def _read(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        buffer = _bytes_of(tensor)
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)
            if count == 0:
                damaged(self.path, f"it ends at byte {offset + done}, inside a tensor")
            done += count
        return tensor


class ContainerWriter:
    """A safetensors file that is planned first and then filled, one tensor (or some rows) at a time, in any order.

    Args:
        path: a file that must not exist.
        specs: every tensor that the file will hold.
        metadata: strings to keep in the header.

    `close` writes the header and makes the file durable; a file that was never closed is refused by every reader.

    Raises:
        FormatError: specs that no file can hold (`plan_header`).
        OSError: the file exists or cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._header, self._begins, self.num_bytes = plan_header(specs, metadata=metadata or {})
        self._specs = {spec.name: spec for spec in specs}
        self._rows_left = {spec.name: _num_rows(spec) for spec in specs}
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one whole tensor; it must have the planned dtype and shape and be written once.

        Raises:
            FormatError: an unplanned name, another dtype or shape, or a tensor already written.
            OSError: the disk refused.
        """
        spec = self._planned(name, tensor)
        if tuple(tensor.shape) != spec.shape or self._rows_left.get(name, 0) != _num_rows(spec):
            self._refuse_write(name, tensor, "the whole of it, once")
        _write(self._file, _bytes_of(tensor.contiguous()), self._begins[name])
        self._rows_left.pop(name, None)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Write rows `start`.. of dimension 0; rows of one tensor come in order, without gaps.

        Raises: as `write`; rows that do not follow the last ones are refused.
        """
        spec = self._planned(name, rows)
        left, count = self._rows_left.get(name, 0), rows.shape[0] if rows.ndim else 0
        if not spec.shape or tuple(rows.shape[1:]) != spec.shape[1:] or not 0 < count <= left:
            self._refuse_write(name, rows, "rows of it, in order")
        if start != spec.shape[0] - left:
            self._refuse_write(name, rows, f"row {spec.shape[0] - left} next, not {start}")
        row_bytes = spec.num_bytes // spec.shape[0]
        _write(self._file, _bytes_of(rows.contiguous()), self._begins[name] + start * row_bytes)
        if left > count:
            self._rows_left[name] = left - count
        else:
            del self._rows_left[name]

    @property
    def is_complete(self) -> bool:
        """True once every planned tensor has been written in full."""
        return not self._rows_left

    def close(self) -> None:
        """Flush to the disk and close. Raises: FormatError if a planned tensor is missing (the file is removed)."""
        if self._rows_left:
            missing = list(self._rows_left)
            self.abandon()
            raise FormatError(
                f"{self.path} is incomplete; {len(missing)} planned tensors are missing, {missing[0]} among them. "
                "A file is closed once every planned tensor is written. Write them, or plan fewer."
            )
        try:
            # the header comes last: until then the file begins with zeros, and no reader takes it for whole
            os.fsync(self._file)
            _write(self._file, memoryview(self._header), 0)
            os.fsync(self._file)
        except BaseException:
            self.abandon()
            raise
        os.close(self._file)

    def abandon(self) -> None:
        """Close and remove the unfinished file."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> ContainerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _planned(self, name: str, tensor: Tensor) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None or tensor.dtype != spec.dtype:
            self._refuse_write(name, tensor, "planned tensors in their planned dtype")
        return spec

    def _refuse_write(self, name: str, tensor: Tensor, allowed: str) -> NoReturn:
        spec = self._specs.get(name)
        planned = f"{spec.dtype} of shape {spec.shape}" if spec is not None else "no such tensor"
        raise FormatError(
            f"{self.path}: writing {name} refused; got {tensor.dtype} of shape {tuple(tensor.shape)}, planned: "
            f"{planned}. Allowed: {allowed}. Plan what is written."
        )


def _num_rows(spec: TensorSpec) -> int:
    """Rows of dimension 0 to write; a scalar, and a tensor without elements, is written as one."""
    return spec.shape[0] if spec.shape and spec.num_bytes else 1


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _write(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
