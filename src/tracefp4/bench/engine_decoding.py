"""The local engine in the middle of its work: sequences that begin at a context, over pages of random bytes.

Prefill would take longer than all that is measured, and its result does not matter: a decode step takes as long over
random K and V. So a sequence is queued as usual, its tokens but the last count as computed, and once the scheduler has
given it pages these are filled. From there on every step is the engine's own: schedule, pass, draw, record. What is
recorded are the steps; the positions before them have no rows. This is for measuring, never for completions.
"""

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.guidance.record import Record, Site
from tracefp4.kvcache import KVPool, PageAllocator
from tracefp4.kvcache.pool import frame_of
from tracefp4.ops.pages import Pages
from tracefp4.rollout import LocalEngine, SamplingParams
from tracefp4.rollout import sequence as rollout_sequence

SCALE_BYTES = (0x28, 0x31)
"""E4M3 bytes of random block scales, first and one past the last: 0.25 to 0.5, so that values have about unit size."""
NUM_CHECKED = 32
"""Positions, at most, whose recorded bytes are compared with the pages."""


class DecodingEngine(LocalEngine):
    """A local engine that can be set to decode at any context."""

    def place(self, contexts: Sequence[int], *, num_steps: int, seed: int = 0) -> None:
        """Drop what runs, and let one sequence run for each context; one step is taken.

        Args:
            contexts: Tokens of every sequence after `num_steps` steps, the sampled ones included; each above
                num_steps.
            num_steps: Steps that will be taken, this call's included; nothing ends in them.
            seed: Of tokens, draws, bytes and the order of the pages.

        Raises:
            ConfigError: A context is too short, or the sequences do not run all at once.
        """
        if min(contexts) <= num_steps:
            raise ConfigError(
                f"bench engine: {num_steps} steps cannot be taken up to a context of {min(contexts)} tokens; a "
                "sequence begins with one token at least. Allowed are more tokens than steps. Lower --steps or raise "
                "--context."
            )
        self.drop()
        generator = random.Random(seed)
        scatter_pages(self._allocator, generator)
        params = SamplingParams(max_tokens=num_steps + 1, seed=seed)
        for index, context in enumerate(contexts):
            last = generator.randrange(self._model.sizes.vocab_size)
            self.submit([0] * (context - num_steps - 1) + [last], params, prompt_index=index)
        for sequence in self._scheduler.waiting:
            sequence.num_computed = sequence.num_cached = len(sequence.ids) - 1
        self.step()
        self._check_running(len(contexts))
        fill_pages(self.pool, seed)

    def take_steps(self, num_steps: int) -> list[float]:
        """Take steps; returns the seconds of each, until its tokens were on the host.

        Raises:
            ConfigError: A sequence had to rest: this was no decode step of all of them.
        """
        seconds, running = [], len(self._scheduler.running)
        for _ in range(num_steps):
            begun = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begun)
        self._check_running(running)
        return seconds

    def drop(self) -> None:
        """Forget all sequences and their log."""
        self._ledger.drop(self._scheduler.request_ids)

    def experts_in_use(self) -> list[int]:
        """Return how many experts the last step used, by routed layer; the engine must record.

        Raises:
            ConfigError: It records nothing.
        """
        records = self._records(self._scheduler.running)
        routed = [record.routed[-1] for record in records if record.routed is not None]
        return [int(ids.unique().numel()) for ids in torch.stack(routed, dim=1)]

    def count_record_differences(self) -> int:
        """Return how many bytes of the oldest sequence's record of K and V are not those of its pages.

        The last steps count, up to NUM_CHECKED. A plan that keeps K and V in bf16 records none: 0.

        Raises:
            ConfigError: The engine records nothing.
        """
        sequence = self._scheduler.running[0]
        (record,) = self._records([sequence])
        # rows of the first step are older than the bytes that pages were filled with
        count = min(NUM_CHECKED, record.length - 1)
        positions = range(sequence.num_cached - count, sequence.num_cached)
        differences = 0
        for site, part in record.sites.items():
            if site.kind in ("k", "v"):
                stored = self._stored(site, sequence.table.frames, positions)
                recorded = torch.cat([part.payload, part.block_scales], dim=1)[record.length - count :]
                differences += int((stored != recorded).sum())
        return differences

    def _records(self, sequences: Sequence[rollout_sequence.Sequence]) -> list[Record]:
        if self._recorder is None:
            raise ConfigError(
                "bench engine: this engine cannot tell what its steps recorded; got records=False. Allowed is an "
                "engine that records. Build it with records=True."
            )
        return [record for record in self._recorder.build(sequences) if record is not None]

    def _stored(self, site: Site, frames: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Codes and scales of some positions as they lie in the pages, uint8 [positions, bytes of a record's row]."""
        layer, size = self.pool.layers[site.layer], self.page_size
        pages: Pages = layer.keys if site.kind == "k" else layer.values
        assert not isinstance(pages, Tensor), "recorded K and V lie in quantized pages"
        rows = []
        for position in positions:
            found = frame_of(pages, frames[position // size])
            parts = [part[:, position % size].flatten() for part in (found.packed, found.block_scales)]
            rows.append(torch.cat(parts))
        return torch.stack(rows).cpu()

    def _check_running(self, wanted: int) -> None:
        running = len(self._scheduler.running)
        if running != wanted or self._scheduler.waiting:
            raise ConfigError(
                f"bench engine: {wanted} sequences cannot decode at once; {running} of them do. Allowed are batches "
                "whose pages are there at every step. Give the engine more memory, or a smaller batch."
            )


def scatter_pages(allocator: PageAllocator, generator: random.Random) -> None:
    """Hand the free frames out from now on in random order, as after many sequences have come and gone."""
    pages = [allocator.allocate() for _ in range(allocator.num_pages - allocator.num_used)]
    generator.shuffle(pages)
    for page in pages:
        allocator.rest(page)
        allocator.drop(page)


def fill_pages(pool: KVPool, seed: int) -> None:
    """Fill all frames but the null frame with random codes under valid scales, or with normal numbers in bf16."""
    generator = torch.Generator(pool.device).manual_seed(seed)
    for layer in pool.layers:
        for pages in (layer.keys, layer.values):
            if isinstance(pages, Tensor):
                pages[:, : pool.null_frame].normal_(generator=generator)
                continue
            pages.packed[:, : pool.null_frame].random_(0, 256, generator=generator)
            pages.block_scales[:, : pool.null_frame].random_(*SCALE_BYTES, generator=generator)
