"""The local engine in the middle of its work: sequences that begin at a context, over pages of random bytes.

Prefill would take longer than all that is measured, and its result does not matter: a decode step takes as long over
random K and V. So a sequence is queued as usual, its tokens but the last count as computed, and once the scheduler has
given it pages these are filled. From there on every step is the engine's own: schedule, pass, draw, record. What is
recorded are the steps; the positions before them have no rows. This is for measuring, never for completions.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import Record, Site
from tracefp4.kvcache import KVPool, PageAllocator, PageTable
from tracefp4.kvcache.pool import frame_of
from tracefp4.kvcache.states import StatePool
from tracefp4.ops.pages import Pages
from tracefp4.rollout import LocalEngine, SamplingParams
from tracefp4.rollout import sequence as rollout_sequence
from tracefp4.rollout.graphs import DecodeGraphs, Outputs

SCALE_BYTES = (0x28, 0x31)
"""E4M3 bytes of random block scales, first and one past the last: 0.25 to 0.5, so that values have about unit size."""
STATE_STD = 0.1
"""Of random states."""
NUM_CHECKED = 32
"""Positions, at most, whose recorded bytes are compared with the pages."""


class DecodingEngine(LocalEngine):
    """A local engine that can be set to decode at any context; its pages come in random order."""

    def __post_init__(self, config: Any, state: Mapping[str, Tensor | BlockTensor]) -> None:
        self._stays = False
        super().__post_init__(config, state)
        scatter_pages(self._allocator, random.Random(0))

    def place(self, contexts: Sequence[int], *, num_steps: int, seed: int = 0) -> None:
        """Drop what runs, and let one sequence run for each context; one step is taken.

        Args:
            contexts: Tokens of every sequence after `num_steps` steps, the sampled ones included; each above
                num_steps.
            num_steps: Steps that will be taken, this call's included; nothing ends in them.
            seed: Of tokens, draws and bytes.

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
        is_placing = True

        def clear(frame: int) -> None:
            # pages that a sequence begins with are filled all at once
            if not is_placing:
                self.pool.clear(frame)

        self._residence.new_table = lambda: PageTable(
            self._allocator, page_size=self.page_size, copy=self.pool.copy, clear=clear
        )
        self._stays = True  # a pass started ahead would not see what pages are filled with
        params = SamplingParams(max_tokens=num_steps + 1, seed=seed)
        for index, context in enumerate(contexts):
            last = generator.randrange(self._model.sizes.vocab_size)
            self.submit([0] * (context - num_steps - 1) + [last], params, prompt_index=index)
        for sequence in self._scheduler.waiting:
            sequence.num_computed = sequence.num_cached = len(sequence.ids) - 1
        self.step()
        self._stays = is_placing = False
        self._check_running(len(contexts))
        fill_pages(self.pool, seed)
        if self.pool.states is not None:
            fill_states(self.pool.states, seed)

    def take_steps(self, num_steps: int, *, stays: bool = False) -> list[float]:
        """Take steps; returns the seconds of each, until its tokens were on the host.

        Args:
            num_steps: How many; 0 is fine.
            stays: Start no pass ahead in the last one.

        Raises:
            ConfigError: A sequence had to rest: this was no decode step of all of them.
        """
        seconds, running = [], len(self._scheduler.running)
        for step in range(num_steps):
            self._stays = stays and step == num_steps - 1
            begun = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begun)
        self._stays = False
        self._check_running(running)
        return seconds

    @property
    def _may_run_ahead(self) -> bool:
        return not self._stays and super()._may_run_ahead

    def drop(self) -> None:
        """Forget all sequences and their log."""
        self._drop(self._scheduler.request_ids)

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

    def count_draw_differences(self) -> int:
        """Take one step that stays; returns how many sequences draw another token in it than the same pass launch by
        launch.

        No pass may have been started ahead (`take_steps`). An engine that captures no passes has only the latter: 0.
        """
        if self._graphs is None:
            self.take_steps(1, stays=True)
            return 0
        assert self._ahead is None, "the step before was to stay"
        self._scheduler.schedule()  # the step will find the pages that this gives out
        rows = self._scheduler.rows
        launched = DecodeGraphs(self._model, self.pool, rows, None, capture=launch_by_launch)
        with kept_states(self.pool.states):
            started = launched.run(len(rows))
            started.wait()
        tokens, sequences = started.sampled.tokens.tolist(), list(rows.sequences)
        self.take_steps(1, stays=True)
        return sum(sequence.ids[-1] != token for sequence, token in zip(sequences, tokens, strict=True))

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
        plain = {index: frame_of(pages, frames[index]) for index in {p // size for p in positions}}
        rows = []
        for position in positions:
            found = plain[position // size]
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


def launch_by_launch(body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Stand in for the capture of a pass: repeating it launches everything again."""
    outputs = body()

    def repeat() -> None:
        outputs.drawn.copy_(body().drawn)

    return repeat, outputs


@contextmanager
def kept_states(states: StatePool | None) -> Iterator[None]:
    """Put every state back as it was before the body, from host memory."""
    parts = [] if states is None else [part for layer in states.layers.values() for part in layer]
    saved = [part.to("cpu", copy=True) for part in parts]
    yield
    for part, before in zip(parts, saved, strict=True):
        part.copy_(before)


def scatter_pages(allocator: PageAllocator, generator: random.Random) -> None:
    """Hand the free frames out from now on in random order, as after many sequences have come and gone."""
    pages = [allocator.allocate() for _ in range(allocator.num_pages - allocator.num_used)]
    generator.shuffle(pages)
    for page in pages:
        allocator.rest(page)
        allocator.drop(page)


def fill_states(states: StatePool, seed: int) -> None:
    """Fill all states with normal numbers, small enough for a step to leave them so."""
    generator = torch.Generator(states.device).manual_seed(seed)
    for layer in states.layers.values():
        for part in layer:
            part.normal_(std=STATE_STD, generator=generator)


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
