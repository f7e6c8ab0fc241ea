"""Open a store by what it is: a directory, shared memory of this host, or the address of a server on another.

One call gives writer, reader and retention of the same store. Nothing is opened when this file is imported; the
network backend needs the `transport` extra and is imported where it is asked for.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tracefp4.errors import ConfigError
from tracefp4.store.pending import WriterOptions
from tracefp4.store.protocol import Reader, Retention, Writer
from tracefp4.store.reader import DirectoryReader
from tracefp4.store.retention import DirectoryRetention
from tracefp4.store.shared_memory import DEFAULT_CAPACITY, ROOT, SharedMemory, SharedMemoryWriter
from tracefp4.store.writer import DirectoryWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStore:
    """The sides of one store."""

    writer: Writer
    """Takes segments."""
    reader: Reader
    """Reads slices."""
    retention: Retention
    """Removes trajectories."""
    memory: SharedMemory | None = None
    """The shared memory that it lives in; None elsewhere."""

    def close(self) -> None:
        """Write what is queued, then close all of it, even where one side cannot be closed; shared memory that nobody
        else uses is given back."""
        with ExitStack() as sides:
            if self.memory is not None:
                sides.callback(self.memory.close)
            if isinstance(self.retention, DirectoryRetention):
                sides.callback(self.retention.close)
            sides.callback(self.reader.close)
            sides.callback(self.writer.close)


def open_directory(path: str | os.PathLike[str], *, options: WriterOptions | None = None) -> OpenStore:
    """Open the store in a directory, created if absent.

    Raises: BackendError if the directory cannot be used; RecordError for a store of another schema.
    """
    with ExitStack() as opened:
        writer = DirectoryWriter(path, options)
        opened.callback(writer.close)
        reader = DirectoryReader(path)
        opened.callback(reader.close)
        store = OpenStore(writer=writer, reader=reader, retention=DirectoryRetention(path))
        opened.pop_all()
    return store


def open_shared(
    name: str,
    *,
    capacity_bytes: int = DEFAULT_CAPACITY,
    options: WriterOptions | None = None,
    root: Path = ROOT,
) -> OpenStore:
    """Open shared memory by name, made if absent.

    Args:
        name: the same name is the same memory, for every process of this host.
        capacity_bytes: size, the same for all its users.
        options: of the writer.
        root: the memory file system.

    Raises: BackendError without room for it; ConfigError if it exists with another capacity.
    """
    with ExitStack() as opened:
        memory = SharedMemory(name, capacity_bytes=capacity_bytes, root=root)
        opened.callback(memory.close)
        writer = SharedMemoryWriter(memory, options)
        opened.callback(writer.close)
        reader = DirectoryReader(memory.path)
        opened.callback(reader.close)
        retention = DirectoryRetention(memory.path)
        store = OpenStore(writer=writer, reader=reader, retention=retention, memory=memory)
        opened.pop_all()
    return store


def open_remote(address: str, *, options: WriterOptions | None = None, key: Path | None = None) -> OpenStore:
    """Open the store behind a server.

    Args:
        address: of `tracefp4 store serve`, such as "tcp://10.0.0.5:5555"; nothing is sent before the first call.
        options: policy, queue and longest wait of the writer; the rest is the server's.
        key: file of the server's key, if it has one.

    Raises: ConfigError for another kind of address, a file that holds no key, or without the `transport` extra.
    """
    try:
        from tracefp4.store.connection import LineSettings
        from tracefp4.store.keys import read_key
        from tracefp4.store.remote import RemoteReader
        from tracefp4.store.remote_writer import RemoteWriter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A store on another host needs pyzmq; got {address!r} and {error}. Records can also stay in a directory "
            "or in shared memory. Install it: pip install 'tracefp4[transport]'."
        ) from error
    given = options or WriterOptions()
    settings = LineSettings(key=None if key is None else read_key(key))
    reader = RemoteReader(address, settings=settings)
    writer = RemoteWriter(
        address,
        policy=given.policy,
        max_queue_bytes=given.max_queue_bytes,
        max_wait_s=given.max_wait_s,
        settings=settings,
    )
    return OpenStore(writer=writer, reader=reader, retention=reader)
