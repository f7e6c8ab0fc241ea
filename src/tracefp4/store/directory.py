"""A store in a directory: one file per key, complete or absent, whatever kills the writer.

`put` writes a temporary file, syncs it, renames it over the final name and syncs the directory, so a reader
sees the old bytes or the new ones. File names are the percent-escaped key, so no key can leave the directory.
A chunk starts with magic (8 bytes), schema version (u32), data length (u64) and a 16-byte BLAKE2b digest, all
checked at `get`. Temporary files of writers that died are invisible to `keys` and removed when a store is
opened.
"""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path
from urllib.parse import quote, unquote

from tracefp4.errors import BackendError, RecordError
from tracefp4.store.protocol import CHECKSUM_BYTES, checked_key, checksum, damaged, missing

MAGIC = b"TFP4CHK\n"
SCHEMA_VERSION = 1
CHUNK_SUFFIX = ".chunk"
PARTIAL_SUFFIX = ".partial"
# Longest file name that every common file system takes.
MAX_NAME_BYTES = 255
_PREFIX = struct.Struct(f"<8sIQ{CHECKSUM_BYTES}s")


class DirectoryStore:
    """Store that keeps every key in its own file under `path` (created if absent)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BackendError(
                f"Cannot use {self.path} as a store: {error.strerror}. A store needs a directory that it may "
                "write. Choose another path."
            ) from error
        self._remove_leftovers()

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`, durably.

        Raises: BackendError with path and bytes needed if the disk is full or refuses; nothing half-written
        is left and the former bytes of the key stay.
        """
        target = self._file(key)
        chunk = _PREFIX.pack(MAGIC, SCHEMA_VERSION, len(data), checksum(data)) + data
        partial = self.path / f"{os.getpid()}-{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        try:
            _write_synced(partial, chunk)
            partial.replace(target)
            _sync_directory(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise BackendError(
                f"Could not write key {key!r} to {target}: {error.strerror}. The disk must take {len(chunk)} "
                "bytes. Free that much space or move the store; the former bytes of the key, if any, are "
                "untouched."
            ) from error
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def get(self, key: str) -> bytes:
        """Bytes under `key`. Raises: MissingKeyError, or RecordError if the file is not what was put."""
        file = self._file(key)
        try:
            chunk = file.read_bytes()
        except FileNotFoundError:
            raise missing(key, str(self.path)) from None
        if len(chunk) < _PREFIX.size:
            raise damaged(key, str(file), found=f"{len(chunk)} bytes", expected=f"at least {_PREFIX.size}")
        magic, schema, length, expected = _PREFIX.unpack_from(chunk)
        if (magic, schema) != (MAGIC, SCHEMA_VERSION):
            raise RecordError(
                f"Chunk {file} refused: it has magic {magic!r} and schema version {schema}, this version "
                f"reads {MAGIC!r} and {SCHEMA_VERSION}. Use the tracefp4 that wrote it, or record again."
            )
        data = chunk[_PREFIX.size :]
        if len(data) != length:
            raise damaged(key, str(file), found=f"{len(data)} bytes", expected=f"{length} bytes")
        found = checksum(data)
        if found != expected:
            raise damaged(key, str(file), found=found.hex(), expected=expected.hex())
        return data

    def delete(self, key: str) -> None:
        """Remove `key`, durably. Raises: MissingKeyError."""
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            raise missing(key, str(self.path)) from None
        _sync_directory(self.path)

    def keys(self) -> list[str]:
        """Every key, sorted; partial and foreign files are not keys."""
        names = (entry.name for entry in os.scandir(self.path) if entry.name.endswith(CHUNK_SUFFIX))
        return sorted(unquote(name.removesuffix(CHUNK_SUFFIX)) for name in names)

    def __contains__(self, key: str) -> bool:
        return self._file(key).exists()

    def _file(self, key: str) -> Path:
        name = quote(checked_key(key), safe="") + CHUNK_SUFFIX
        if len(name) > MAX_NAME_BYTES:
            raise RecordError(
                f"Store key refused; {key!r} escapes to {len(name)} bytes. File names have at most "
                f"{MAX_NAME_BYTES}. Use letters, digits, '-', '_' and '.' in trajectory names."
            )
        return self.path / name

    def _remove_leftovers(self) -> None:
        """Remove partial files whose writer no longer runs; a live writer's file is left alone."""
        for entry in list(os.scandir(self.path)):
            if entry.name.endswith(PARTIAL_SUFFIX) and not _is_running(entry.name.partition("-")[0]):
                Path(entry.path).unlink(missing_ok=True)


def _write_synced(path: Path, chunk: bytes) -> None:
    with open(path, "xb") as file:
        file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    # A rename is durable only once its directory is.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_running(pid: str) -> bool:
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
