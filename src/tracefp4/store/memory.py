"""A store in this process's memory, for callers whose bytes need not outlive it; it keeps the contract of a
DirectoryStore and is tested against it. Recipes offer the directory only.
"""

from __future__ import annotations

from tracefp4.store.protocol import checked_key, checksum, damaged, missing


class MemoryStore:
    """Store that keeps bytes in a dict; the contract of a directory, but nothing outlives the process."""

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[bytes, bytes]] = {}

    def put(self, key: str, data: bytes) -> None:
        """Keep a copy of `data` under `key`."""
        kept = bytes(data)
        self._chunks[checked_key(key)] = (checksum(kept), kept)

    def get(self, key: str) -> bytes:
        """Bytes under `key`. Raises: MissingKeyError, or RecordError if memory was damaged."""
        if key not in self._chunks:
            raise missing(key, "memory")
        expected, data = self._chunks[key]
        found = checksum(data)
        if found != expected:
            raise damaged(key, "memory", found=found.hex(), expected=expected.hex())
        return data

    def delete(self, key: str) -> None:
        """Remove `key`. Raises: MissingKeyError."""
        if key not in self._chunks:
            raise missing(key, "memory")
        del self._chunks[key]

    def keys(self) -> list[str]:
        """Every key, sorted."""
        return sorted(self._chunks)

    def __contains__(self, key: str) -> bool:
        return key in self._chunks
