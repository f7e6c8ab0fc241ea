"""Where bytes go: keys and bytes, durable and checked, without torch and without knowing what they mean."""

from tracefp4.store.directory import DirectoryStore
from tracefp4.store.memory import MemoryStore
from tracefp4.store.protocol import MissingKeyError, Store

__all__ = ["DirectoryStore", "MemoryStore", "MissingKeyError", "Store"]
