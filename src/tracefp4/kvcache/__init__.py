"""Where K and V live between passes: page accounting, page tables, and the FP4 or BF16 bytes themselves; and the states
of layers that have neither."""

from tracefp4.kvcache.pages import Page, PageAllocator
from tracefp4.kvcache.pool import CacheShape, KVPool
from tracefp4.kvcache.states import State, StatePool, StateShape
from tracefp4.kvcache.tables import PageTable

__all__ = ["CacheShape", "KVPool", "Page", "PageAllocator", "PageTable", "State", "StatePool", "StateShape"]
