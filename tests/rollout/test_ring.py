"""Bytes on their way to the log: in order, whole, waited for where they are read, and never lost in silence."""

import threading

import pytest
import torch
from tests.rollout.engines import make_prompts, sampled
from tests.rollout.native_engines import captured_engine

from tracefp4.errors import RecordError
from tracefp4.models.taps import StackedSite, StackedTaps
from tracefp4.rollout.ring import RecordRing

CPU = torch.device("cpu")


def taps_of(num_rows, *, first=0, per_token=2):
    """A pass whose token t holds the number first + t in every byte."""
    numbers = torch.arange(first, first + num_rows, dtype=torch.uint8)

    def part(width, count=1):
        rows = numbers.repeat_interleave(count)[None, :, None]
        return rows.expand(3, num_rows * count, width).contiguous()

    w2 = StackedSite(
        layers=(0, 1, 2),
        packed=part(8, per_token),
        block_scales=part(1, per_token),
        exponents=part(1, per_token)[..., 0].to(torch.int8),
        static_exponents=None,
    )
    return StackedTaps(sites={"w2": w2}, routed_layers=(0, 1, 2), ids=part(2).to(torch.int16))


def collecting(found, gate=None):
    def sink(taps, count):
        if gate is not None:
            gate.wait(10)
        rows = taps.sites["w2"]
        for tensor in (rows.packed, rows.block_scales, rows.exponents, taps.ids):
            assert tensor.shape[1] == count * (1 if tensor is taps.ids else 2)
        assert torch.equal(rows.packed[0, ::2, 0].long(), taps.ids[0, :, 0].long())
        found.extend(taps.ids[2, :, 1].tolist())

    return sink


@pytest.mark.parametrize("slot_tokens", [1, 3, 50])
def test_passes_arrive_in_order_without_their_padding(slot_tokens):
    # Mutation: a piece of a long pass cut by rows where tokens have several.
    ring, found = RecordRing(CPU, num_slots=2, slot_tokens=slot_tokens), []
    ring.push(taps_of(8), num_tokens=5, num_rows=8, sink=collecting(found))
    ring.push(taps_of(7, first=5), num_tokens=7, num_rows=7, sink=collecting(found))
    ring.drain()
    assert found == list(range(12))


def test_what_was_pushed_may_be_written_again_at_once():
    ring, found, gate = RecordRing(CPU, num_slots=2, slot_tokens=8), [], threading.Event()
    taps = taps_of(4)
    ring.push(taps, num_tokens=4, num_rows=4, sink=collecting(found, gate))
    taps.ids.zero_()
    taps.sites["w2"].packed.zero_()
    gate.set()
    ring.drain()
    assert found == [0, 1, 2, 3]


def test_a_full_ring_makes_the_pass_wait_and_counts_it():
    ring, found, gate = RecordRing(CPU, num_slots=2, slot_tokens=4), [], threading.Event()
    for first in (0, 4):
        ring.push(taps_of(4, first=first), num_tokens=4, num_rows=4, sink=collecting(found, gate))
    assert ring.num_waits == 0
    threading.Timer(0.2, gate.set).start()
    ring.push(taps_of(4, first=8), num_tokens=4, num_rows=4, sink=collecting(found, gate))
    assert ring.num_waits == 1
    ring.drain()
    assert found == list(range(12))


def test_a_failed_copy_is_raised_until_the_rows_are_given_up():
    ring, found = RecordRing(CPU, num_slots=2, slot_tokens=4), []

    def fail(taps, count):
        raise MemoryError("no room")

    ring.push(taps_of(4), num_tokens=4, num_rows=4, sink=fail)
    for _ in range(2):
        with pytest.raises(RecordError, match="did not reach the log; got MemoryError: no room"):
            ring.drain()
        with pytest.raises(RecordError, match="did not reach the log"):
            ring.push(taps_of(4), num_tokens=4, num_rows=4, sink=collecting(found))
    assert found == [] and ring.reset() and not ring.reset()
    ring.push(taps_of(4), num_tokens=4, num_rows=4, sink=collecting(found))
    ring.drain()
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_engine_goes_on_after_a_failed_copy(monkeypatch, prefix_cache):
    engine, _ = captured_engine(prefix_cache=prefix_cache)
    prompts = make_prompts(2, shortest=6)
    expected = engine.generate(prompts, sampled(5))
    add_step, calls = type(engine._recorder._log).add_step, []

    def fail_third(log, *args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError
        return add_step(log, *args, **kwargs)

    monkeypatch.setattr(type(engine._recorder._log), "add_step", fail_third)
    with pytest.raises(RecordError, match="did not reach the log; got MemoryError"):
        engine.generate([[9, 8, 7, 6, 5, 4]], sampled(8))
    assert not engine.has_work and engine._recorder.num_rows == 0
    found = engine.generate(prompts, sampled(5))
    assert [[c.token_ids for c in row] for row in found] == [[c.token_ids for c in row] for row in expected]
