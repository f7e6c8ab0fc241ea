"""What a store is: bytes under a key, whole or not at all. A store never knows what the bytes mean.

Five methods. A `put` that returns has made the bytes durable; one that raises has left the key as it was. A
`get`
gives back exactly the bytes that were put or raises: a damaged chunk is refused, never returned. Keys are any
non-empty text (a store escapes what its medium cannot hold). Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from tracefp4.errors import RecordError

MAX_KEY_CHARACTERS = 160
CHECKSUM_BYTES = 16


class MissingKeyError(RecordError):
    """The store holds nothing under this key; not damage, because a missing record is allowed."""


class Store(Protocol):
    """Keyed, checksummed, atomic bytes."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`, replacing what was there. Raises: BackendError if the medium refuses."""

    def get(self, key: str) -> bytes:
        """Bytes under `key`. Raises: MissingKeyError if there are none, RecordError if they are damaged."""

    def delete(self, key: str) -> None:
        """Remove `key`. Raises: MissingKeyError if it is not there."""

    def keys(self) -> list[str]:
        """Every key, sorted."""

    def __contains__(self, key: str) -> bool:
        """Whether `key` is held (its bytes are not checked)."""


def checked_key(key: str) -> str:
    """The key itself, if a store may hold it. Raises: RecordError for an empty or overlong key."""
    if not key or len(key) > MAX_KEY_CHARACTERS:
        raise RecordError(
            f"Store key refused; got {len(key)} characters ({key[:40]!r}). Keys have 1 to "
            f"{MAX_KEY_CHARACTERS}. Shorten the trajectory name."
        )
    return key


def checksum(data: bytes) -> bytes:
    """16-byte BLAKE2b digest of the bytes."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def missing(key: str, place: str) -> MissingKeyError:
    """The error for a key that is not held in `place`."""
    return MissingKeyError(
        f"No bytes under key {key!r} in {place}. Only keys listed by keys() can be read or deleted. "
        "Check the run directory, or treat the record as missing."
    )


def damaged(key: str, place: str, *, found: str, expected: str) -> RecordError:
    """The error for bytes that are not what was put."""
    return RecordError(
        f"Bytes under key {key!r} in {place} are damaged: found {found}, expected {expected}. Both must be "
        "equal. Delete the key (its positions then round to nearest) and check the disk."
    )
