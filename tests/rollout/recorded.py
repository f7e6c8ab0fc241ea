"""Every position of a record against a recomputation, and every byte of K and V against the pages."""

from dataclasses import replace

import torch
from tests.rollout.engines import make_engine

from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance import Site


def forced_record(model, completion, **changes):
    """The record of a fresh engine in the control arithmetic that decodes the same tokens, alone."""
    engine = make_engine(model, control=True, **changes)
    (row,) = engine.force([completion.prompt_ids], [[completion.token_ids]])
    return row[0].record


def differing(record, other, *, sites=None, routing=True, begin=0, end=None):
    """Positions begin .. end-1 at which two records have other codes, scales, exponents or experts.

    Positions that only one of the two has differ as well.
    """
    first, last = (
        max(begin, record.start, other.start),
        min(record.start + record.length, other.start + other.length),
    )
    longest = max(record.start + record.length, other.start + other.length)
    stop = longest if end is None else end
    found = set(range(min(last, stop), stop))
    assert record.sites.keys() == other.sites.keys()
    for position in range(first, min(last, stop)):
        if not _equal_at(record, other, position, sites=sites, routing=routing):
            found.add(position)
    return sorted(found)


def _equal_at(record, other, position, *, sites, routing):
    own, its = (found.rows(position - found.start, position - found.start + 1) for found in (record, other))
    for site, part in own.sites.items():
        if sites is not None and site.kind not in sites:
            continue
        wanted = its.sites[site]
        arrays = [(part.payload, wanted.payload), (part.block_scales, wanted.block_scales)]
        if part.exponent is not None:
            arrays.append((part.exponent, wanted.exponent))
        if not all(torch.equal(a, b) for a, b in arrays) or part.static_exponent != wanted.static_exponent:
            return False
    return not routing or record.routed is None or torch.equal(own.routed, its.routed)


def shifted(record):
    """The same rows, each attached to the position before its own: what a recorder off by one would give."""
    return replace(record.rows(1, record.length), start=record.start)


def assert_recorded(completion, model, *, first=1, **changes):
    """Every position's record equals a recomputation's, and one that is shifted by one does not."""
    record = completion.record
    assert record.length == len(completion.prompt_ids) + len(completion.token_ids) - 1
    expected = forced_record(model, completion, **changes)
    assert differing(record, expected) == []
    wrong = differing(shifted(record), expected)
    # equal tokens at neighbouring positions still differ in K after RoPE
    assert wrong == list(range(record.length)), "a record that is off by one must be seen at every position"


def assert_pages_hold_the_record(engine, sequence):
    """K and V of every cached position: the bytes in the sequence's frames are those of its record."""
    if not sequence.num_cached or not sequence.follows or not sequence.table.is_resident:
        return
    if sequence.rebuild is not None or engine._recorder is None:
        return
    (record,) = engine._recorder.build([sequence])
    frames, count = sequence.table.frames, sequence.num_cached
    for layer, pages in enumerate(engine.pool.layers):
        for kind, stored in (("k", pages.keys), ("v", pages.values)):
            part = record.sites.get(Site(kind, layer))
            if part is None or not isinstance(stored, BlockTensor):
                continue
            for bytes_CFSW, recorded in (
                (stored.packed, part.payload),
                (stored.block_scales, part.block_scales),
            ):
                held = bytes_CFSW[:, frames].flatten(1, 2).transpose(0, 1).flatten(1)[:count]
                assert torch.equal(held, recorded[:count]), (sequence.order, layer, kind)


def assert_frames_add_up(engine):
    """Holders and users of every page are the tables that list it, and every frame belongs to one page or is free."""
    allocator = engine._allocator
    holders, users = {}, {}
    sequences = [*engine._scheduler.running, *engine._scheduler.waiting]
    for sequence in sequences:
        for page in sequence.table.pages:
            holders[page] = holders.get(page, 0) + 1
            users[page] = users.get(page, 0) + sequence.table.is_resident
    cached = [] if engine._prefixes is None else [entry.page for entry in engine._prefixes.entries]
    assert len(cached) == len(set(map(id, cached)))
    for page in cached:
        holders[page] = holders.get(page, 0) + 1
        assert page.is_cached and not page.is_lost
    frames = [page.frame for page in holders if page.frame is not None]
    assert len(frames) == len(set(frames)) == allocator.num_used
    assert allocator.num_saved == sum(page.saved is not None for page in holders)
    for page, count in holders.items():
        assert (page.holders, page.users) == (count, users.get(page, 0))
        assert page.users == 0 or page.frame is not None


def assert_nothing_left(engine):
    """No request, page, host copy or log row remains; only what the prefix cache keeps on purpose."""
    assert not engine.has_work and not engine._ledger.finished
    assert engine._recorder is None or engine._recorder.num_rows == 0
    assert engine._allocator.num_used == engine._allocator.num_spare
    assert engine._allocator.num_saved == 0
    assert_frames_add_up(engine)
    if engine._prefixes is not None:
        engine._prefixes.clear(weight_version=engine.weight_version)
    assert engine._allocator.num_used == 0
    assert engine._allocator._spare == engine._allocator._idle == {}
