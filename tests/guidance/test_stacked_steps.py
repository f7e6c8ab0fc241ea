"""Steps given as bytes: the log and its records are those of steps that were observed site by site."""

import dataclasses

import pytest
import torch
from tests.guidance.sample_records import (
    K0,
    KV_EXPONENT,
    TOP_K,
    W0,
    X0,
    X1,
    activations,
    identity,
    recorded,
    round_at,
    router_logits,
)

from tracefp4.errors import RecordError
from tracefp4.formats.packing import pack_codes
from tracefp4.guidance import SequenceRows, Site, StepLog, builder, records_equal, route_site

SITES = (X0, X1, K0, W0)


@dataclasses.dataclass(frozen=True)
class Rows:
    layers: tuple
    packed: torch.Tensor
    block_scales: torch.Tensor
    exponents: torch.Tensor | None
    static_exponents: tuple | None


def bytes_of(positions, *, trajectory=0, sites=SITES):
    """(sites by kind, ids) of a step over some positions, as kernels would hand them over."""
    found = {}
    for kind in sorted({site.kind for site in sites}):
        layers = tuple(sorted(site.layer for site in sites if site.kind == kind))
        rounded = [
            round_at(
                site := Site(kind, layer),
                activations(trajectory, positions, site=site, rows=TOP_K if kind == "w2" else 1),
            )
            for layer in layers
        ]
        is_static = kind == "k"
        found[kind] = Rows(
            layers,
            torch.stack([pack_codes(part.codes) for part in rounded]),
            torch.stack([part.block_scales for part in rounded]),
            None if is_static else torch.stack([part.outer for part in rounded]),
            (KV_EXPONENT,) * len(layers) if is_static else None,
        )
    ids = [
        route_site(layer, router_logits(trajectory, positions, layer=layer), top_k=TOP_K) for layer in (0, 1)
    ]
    return found, torch.stack(ids).to(torch.uint8)


def new_log():
    return StepLog(sites=SITES, routed_layers=(0, 1), num_experts=8)


def built(steps):
    log, rows = new_log(), []
    for positions in steps:
        sites, ids = bytes_of(positions)
        first = log.add_step(sites, ids=ids, num_tokens=len(positions))
        rows += range(first, first + len(positions))
    (found,) = log.build([SequenceRows(identity=identity(), rows=rows)])
    return found


def test_records_equal_those_of_observed_steps():
    expected = recorded(0, length=6)
    assert records_equal(built([range(3), [3], [4, 5]]), expected)
    # one position off at one site of one layer, or in the routing of one, is another record
    assert not records_equal(built([range(1, 4), [3], [4, 5]]), expected)
    assert not records_equal(built([range(3), [4], [4, 5]]), expected)


def test_blocks_that_are_full_and_records_built_in_between_change_nothing(monkeypatch):
    # Mutation: the filled part of a block counted in tokens where w2 has rows_per_token.
    monkeypatch.setattr(builder, "BLOCK_TOKENS", 3)
    log, rows = new_log(), []
    for positions in ([0, 1], [2], [3, 4, 5, 6], [7]):
        sites, ids = bytes_of(positions)
        first = log.add_step(sites, ids=ids, num_tokens=len(positions))
        rows += range(first, first + len(positions))
        (found,) = log.build([SequenceRows(identity=identity(), rows=rows)])
        assert records_equal(found, recorded(0, length=len(rows)))
    assert len(log._blocks) == 3


def test_what_a_step_came_in_may_be_written_again():
    log = new_log()
    sites, ids = bytes_of([0, 1])
    log.add_step(sites, ids=ids, num_tokens=2)
    for rows in sites.values():
        rows.packed.zero_()
    (found,) = log.build([SequenceRows(identity=identity(), rows=[0, 1])])
    assert records_equal(found, recorded(0, length=2))


@pytest.mark.parametrize("missing", ["x", "routing", "layer"])
def test_a_step_without_a_site_leaves_nothing(missing):
    log = new_log()
    sites, ids = bytes_of([0])
    if missing == "x":
        del sites["x"]
    elif missing == "layer":
        sites, _ = bytes_of([0], sites=(X0, K0, W0))
    with pytest.raises(RecordError, match="not recorded exactly once everywhere.*Tap what the log records"):
        log.add_step(sites, ids=None if missing == "routing" else ids, num_tokens=1)
    assert log.num_rows == 0 and log.num_bytes == 0
    sites, ids = bytes_of([0])
    assert log.add_step(sites, ids=ids, num_tokens=1) == 0


def test_other_rows_layouts_and_ids_are_refused():
    log = new_log()
    sites, ids = bytes_of([0, 1])
    with pytest.raises(RecordError, match="do not fit a step of 3 tokens"):
        log.add_step(sites, ids=torch.cat([ids, ids[:, :1]], dim=1), num_tokens=3)
    with pytest.raises(RecordError, match=r"ids \(torch.int64, 2, 2\)"):
        log.add_step(sites, ids=ids.long(), num_tokens=2)
    with pytest.raises(RecordError, match=r"ids \(torch.uint8, 1, 2\)"):
        log.add_step(sites, ids=ids[:1], num_tokens=2)
    log.add_step(sites, ids=ids, num_tokens=2)
    halves = {
        kind: dataclasses.replace(rows, packed=rows.packed[..., : rows.packed.shape[2] // 2])
        for kind, rows in sites.items()
    }
    with pytest.raises(RecordError, match="changed its layout"):
        log.add_step(halves, ids=ids, num_tokens=2)
    assert log.num_rows == 2


def test_a_static_exponent_that_changes_within_a_log_is_refused():
    log = new_log()
    for exponent in (KV_EXPONENT, KV_EXPONENT + 1):
        sites, ids = bytes_of([0])
        sites["k"] = dataclasses.replace(sites["k"], static_exponents=(exponent,))
        log.add_step(sites, ids=ids, num_tokens=1)
    with pytest.raises(RecordError, match="static exponent of layers.0.k changed"):
        log.build([SequenceRows(identity=identity(), rows=[0, 1])])
