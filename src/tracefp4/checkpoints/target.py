"""A checkpoint to write: shards, index, config and extra files that appear under their name at once, or not at all.

Everything is written into a hidden sibling of the output directory; config.json comes last, files and directory
are synced, and one rename gives it its name. A process that is killed at any moment leaves no directory that
loads under the output's name, and what it leaves is removed by the next writer to the same output. A directory
that is replaced exists until the new one is whole. Never decides what is in a tensor.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from tracefp4.checkpoints.container import ContainerWriter
from tracefp4.checkpoints.header import TensorSpec, plan_header
from tracefp4.checkpoints.source import CONFIG, INDEX, SINGLE
from tracefp4.errors import BackendError, ConfigError, FormatError

MAX_SHARD_BYTES = 5_000_000_000
# Readers of the transformers family look for it.
METADATA = {"format": "pt"}
# Directories of writers that live in this process: their pid proves nothing about leftovers.
_LIVE: set[Path] = set()


class CheckpointWriter:
    """One output directory, planned first, then filled, then finished.

    Use it in a `with` statement and call `finish` last; leaving without it removes all that was written.

    Args:
        out: the directory to make; parents are made.
        specs: every tensor it will hold; shards take them in this order.
        max_shard_bytes: a shard takes tensors until the next would exceed this; a larger tensor gets its own.
        overwrite: replace a directory that holds a checkpoint (config.json and weights); nothing else is ever replaced.
        extra_bytes: bytes of other files, for the check of free space.
        sidecars: further safetensors files, name -> its tensors, which the index does not list: readers of the model
            do not see them. Their tensors are written like all others.

    Raises:
        ConfigError: `out` is a file, a mount point, or holds something that is not to be overwritten; no tensors.
        BackendError: too little free space; the parent cannot be written.
        FormatError: specs that no container can hold.
    """

    def __init__(
        self,
        out: str | Path,
        specs: Sequence[TensorSpec],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
        extra_bytes: int = 0,
        sidecars: Mapping[str, Sequence[TensorSpec]] | None = None,
    ) -> None:
        self.out = Path(out).resolve()
        shards = plan_shards(specs, max_shard_bytes=max_shard_bytes)
        self._indexed = frozenset(shards)
        shards |= {name: tuple(held) for name, held in (sidecars or {}).items()}
        self.shard_of = {spec.name: shard for shard, held in shards.items() for spec in held}
        """Shard (file name) of every planned tensor."""
        # also refuses, before anything is written, what no container can hold
        self.num_bytes = extra_bytes + sum(
            plan_header(held, metadata=METADATA)[2] for held in shards.values()
        )
        """Bytes that the output needs."""
        self._tensor_bytes = sum(spec.num_bytes for spec in specs)
        self._planned = shards
        self._open: dict[str, ContainerWriter] = {}
        self._closed: set[str] = set()
        _check_free(self.out, overwrite=overwrite)
        with self._reported():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.out)
            self._check_space()
            self._partial = self._sibling("partial")
            _LIVE.add(self._partial)
            self._partial.mkdir()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor, in any order, once.

        Raises:
            FormatError: an unplanned name, another dtype or shape, or a tensor already written.
            BackendError: the disk is full or refuses.
        """
        with self._reported():
            shard, writer = self._writer(name)
            writer.write(name, tensor)
            self._close_if_complete(shard, writer)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Write the next rows of dimension 0 of one planned tensor. Raises: as `write`."""
        with self._reported():
            shard, writer = self._writer(name)
            writer.write_rows(name, start, rows)
            self._close_if_complete(shard, writer)

    def write_file(self, name: str, data: bytes) -> None:
        """Write one small file (not a shard, not config.json), e.g. hf_quant_config.json. Raises: as `write`."""
        assert name not in (CONFIG, INDEX) and not name.endswith(".safetensors"), name
        with self._reported():
            self._write_synced(name, data)

    def copy_file(self, source: Path, name: str) -> None:
        """Copy one file unchanged under a name relative to the output. Raises: BackendError if that fails."""
        with self._reported():
            target = self._partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            _sync(target)

    def finish(self, config: Mapping[str, Any]) -> Path:
        """Write index and config.json, make all of it durable, and give it its name.

        Returns: the output directory.

        Raises:
            FormatError: a planned tensor was never written.
            BackendError: the disk is full or refuses.
        """
        with self._reported():
            for shard in self._planned:
                if shard not in self._closed:
                    self._close(shard)
            if len(self._indexed) > 1:
                self._write_synced(INDEX, self._index())
            self._write_synced(CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
            for directory in (*(path for path in self._partial.rglob("*") if path.is_dir()), self._partial):
                _sync(directory)
            self._publish()
        return self.out

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._open.values():
            writer.abandon()
        self._open.clear()
        shutil.rmtree(self._partial, ignore_errors=True)
        _LIVE.discard(self._partial)

    def _writer(self, name: str) -> tuple[str, ContainerWriter]:
        shard = self.shard_of.get(name)
        if shard is None or shard in self._closed:
            raise FormatError(
                f"Writing {name} refused; it is {'already written' if shard else 'not planned'}. Every planned "
                "tensor is written once. Plan what is written."
            )
        if shard not in self._open:
            self._open[shard] = ContainerWriter(
                self._partial / shard, self._planned[shard], metadata=METADATA
            )
        return shard, self._open[shard]

    def _close_if_complete(self, shard: str, writer: ContainerWriter) -> None:
        # a full shard is synced at once, which bounds both open files and unwritten pages
        if writer.is_complete:
            self._close(shard)

    def _close(self, shard: str) -> None:
        writer = self._open.pop(shard, None)
        if writer is None:
            writer = ContainerWriter(self._partial / shard, self._planned[shard], metadata=METADATA)
        writer.close()
        self._closed.add(shard)

    def _index(self) -> bytes:
        listed = {name: shard for name, shard in self.shard_of.items() if shard in self._indexed}
        content = {"metadata": {"total_size": self._tensor_bytes}, "weight_map": listed}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

    def _publish(self) -> None:
        """Rename the finished directory; an old one moves aside first and is removed afterwards."""
        old = self._sibling("old")
        try:
            if self.out.exists():
                _LIVE.add(old)
                os.rename(self.out, old)
            os.rename(self._partial, self.out)
        except BaseException:
            # also after Ctrl-C between the two
            if old.exists() and not self.out.exists():
                os.rename(old, self.out)
            raise
        _sync(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)
        _LIVE.discard(old)

    def _write_synced(self, name: str, data: bytes) -> None:
        path = self._partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _sibling(self, suffix: str) -> Path:
        owner = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
        return self.out.with_name(f".{self.out.name}.{owner}.{suffix}")

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.out.parent).free
        if free < self.num_bytes:
            raise OSError(errno.ENOSPC, f"only {free} bytes are free")

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn what the file system refuses into an error that says what was needed."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise BackendError(
                f"{self.out} could not be written: {'the disk is full, ' if is_full else ''}{error.strerror or error}. "
                f"It needs {self.num_bytes} bytes in "
                f"{self.out.parent}; nothing under its name was changed. Free space, or name another directory."
            ) from error


def plan_shards(specs: Sequence[TensorSpec], *, max_shard_bytes: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Split tensors, in order, over as few files as a limit on their bytes allows: file name -> its tensors.

    Raises:
        ConfigError: no tensors, or a limit below 1.
        FormatError: a name twice.
    """
    if not specs or max_shard_bytes < 1:
        raise ConfigError(
            f"No checkpoint from {len(specs)} tensors in shards of {max_shard_bytes} bytes. It needs at least one "
            "tensor, and a shard at least one byte. Use the default of 5 GB."
        )
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise FormatError(
            f"The tensor {repeated[0]} is planned twice. Every name is stored once. Plan it once."
        )
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    if len(shards) == 1:
        return {SINGLE: tuple(shards[0])}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": tuple(held) for i, held in enumerate(shards, 1)
    }


def remove_leftovers(out: Path) -> None:
    """Remove what killed writers to `out` left beside it; put an old directory back that lost its name.

    Only directories that carry this module's name, this host and a process that no longer runs are touched.
    """
    pattern = re.compile(rf"\.{re.escape(out.name)}\.{re.escape(_host())}-(\d+)-[0-9a-f]{{8}}\.(partial|old)")
    for path in sorted(out.parent.iterdir()):
        found = pattern.fullmatch(path.name)
        if found is None or path in _LIVE or _is_other_process(int(found[1])):
            continue
        if found[2] == "old" and not out.exists():
            # killed between the two renames: the old checkpoint is the only whole one
            os.rename(path, out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _check_free(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that is not ours to make."""
    if os.path.ismount(out):
        fault, advice = "is a mount point and cannot be renamed to", "Name a directory inside it"
    elif out.exists() and not out.is_dir():
        fault, advice = "is a file", "Name a directory"
    elif not out.is_dir() or not any(out.iterdir()):
        return
    elif not _holds_checkpoint(out):
        # a run directory has a config.json too, and years of work behind it
        fault, advice = (
            f"is not empty, and holds no checkpoint ({CONFIG} and {SINGLE})",
            "Name another directory",
        )
    elif not overwrite:
        fault, advice = (
            "is not empty",
            "Name another directory, or allow this checkpoint to be replaced (--overwrite)",
        )
    else:
        return
    raise ConfigError(f"{out} {fault}. The output is a new or empty directory. {advice}.")


def _holds_checkpoint(out: Path) -> bool:
    return (out / CONFIG).is_file() and any((out / name).is_file() for name in (SINGLE, INDEX))


def _host() -> str:
    # the same pid on another host of a shared file system is another process
    return re.sub(r"[^A-Za-z0-9]", "_", platform.node())[:32]


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
