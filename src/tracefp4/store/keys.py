"""The key of a store server: one file that the server and its clients hold, and nobody else.

The file has one line, the secret half of a CURVE25519 key pair in 40 characters. Both ends prove that they hold it, and
what travels between them is encrypted (CurveZMQ). There are no accounts: whoever has the file may write, read and
remove every record of that server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from tracefp4.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreKey:
    """A key pair, each half as 40 characters of Z85."""

    public: bytes
    """Names the key."""
    secret: bytes = field(repr=False)
    """Proves that its holder belongs to the store."""


def write_key(path: Path) -> None:
    """Write a new key to a new file that only its owner may read. Raises: ConfigError if the file cannot be made."""
    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"Key not written to {path}: {error.strerror}. A key is written to a new file in a directory that exists, "
            "so that none is lost. Choose another path, or remove the old file and its uses."
        ) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret + b"\n")


def read_key(path: Path) -> StoreKey:
    """Read the key that `write_key` wrote. Raises: ConfigError if the file cannot be read or holds no key."""
    try:
        secret = path.read_bytes().strip()
        if len(secret) != 40:
            raise ValueError(f"{len(secret)} characters")
        return StoreKey(public=zmq.curve_public(secret), secret=secret)
    except (OSError, ValueError, zmq.ZMQError) as error:
        cause = (
            error.strerror if isinstance(error, OSError) else error
        )  # the text of an OSError repeats the path
        raise ConfigError(
            f"Key of a store refused: got {path}: {cause}. A key file has one line of 40 characters. Make one with "
            "`tracefp4 store key FILE` and copy it to the server and to its clients."
        ) from error
