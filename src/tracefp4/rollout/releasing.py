"""Between two rollouts the memory of an engine's pages can be the trainer's.

Nothing is lost with it that a later token reads. Unfinished sequences rest, and their pages move to host memory, as
they do whenever others need the frames: they come back with the same bytes, from there or, beyond max_swapped_pages,
from recorded codes (`residence.py`). Pages that only the prefix cache holds go; the same prompts compute them again.
Captured passes read and write fixed addresses, so they go too. Weights stay, and new ones may be loaded meanwhile.
"""

from __future__ import annotations

import torch

from tracefp4.kvcache.pages import PageAllocator
from tracefp4.kvcache.pool import KVPool
from tracefp4.rollout.graphs import DecodeGraphs
from tracefp4.rollout.scheduler import Scheduler


def release_pool(
    pool: KVPool, allocator: PageAllocator, *, scheduler: Scheduler, graphs: DecodeGraphs | None
) -> None:
    """Move what unfinished sequences need to host memory, and give the device's back to its allocator.

    `KVPool.make_again` has to run before the next pass. On a GPU the memory leaves torch as well, so that what the
    trainer keeps does not settle in the middle of it. Doing it twice is doing it once.

    Args:
        pool: whose memory goes.
        allocator: of its pages.
        scheduler: has the sequences; no pass of theirs is under way.
        graphs: captured passes over the pool; None: there are none.
    """
    if not pool.has_memory:
        return
    scheduler.pause()
    allocator.vacate()
    is_cuda = pool.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(pool.device)
    if graphs is not None:
        graphs.drop()
    pool.give_back()
    if is_cuda:
        torch.cuda.empty_cache()
