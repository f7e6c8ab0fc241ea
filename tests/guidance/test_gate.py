"""Bands from measured noise: the quantile, who borrows from whom, fading, state, and what a band does in replay."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.guidance.sample_records import K0, X0, X1, activations, recorded, round_at
from tests.guidance.test_noise import histogram

from tracefp4.errors import ConfigError, RecordError
from tracefp4.guidance import NoiseGate, ReplayBatch, Site, histograms
from tracefp4.guidance.gate import CAP, FLOOR
from tracefp4.guidance.noise import EMPTY, UPPER_EDGES
from tracefp4.guidance.session import replay

X = [Site("x", layer) for layer in range(6)]

# a share that 200 disagreements can show; the default needs 1000
calibrated = partial(NoiseGate.calibrated, coverage=0.995)


def test_a_band_holds_the_asked_share_of_its_own_disagreements():
    # 1000 disagreements: 994 in bin 36, 1 in bin 40, 5 in bin 47. 99.5% are inside bin 40, 99.6% only inside bin 47.
    found = {X0: histogram({36: 994, 40: 1, 47: 5})}
    assert calibrated(found).bands == {X0: UPPER_EDGES[40]}
    assert calibrated(found, coverage=0.996).bands == {X0: UPPER_EDGES[47]}
    assert calibrated(found, coverage=0.99).bands == {X0: UPPER_EDGES[36]}
    assert calibrated(found).borrowed == {}


def test_bands_stay_between_floor_and_cap():
    found = {X0: histogram({5: 500}), X1: histogram({56: 500}), K0: histogram({40: 500})}
    assert calibrated(found).bands == {X0: FLOOR, X1: CAP, K0: UPPER_EDGES[40]}
    moved = calibrated(found, floor=0.125, cap=0.5)
    assert moved.bands == {X0: 0.125, X1: 0.5, K0: 0.125}


def test_a_site_with_few_disagreements_borrows_from_its_kind_layer_by_layer():
    # At 99.5%, 200 are needed. Mutation: neighbours of another kind, or the nearest layer alone.
    counts = {0: {30: 500}, 1: {44: 3}, 2: {34: 150}, 3: {36: 40}, 4: {38: 30}, 5: {40: 300}}
    found = {X[layer]: histogram(part) for layer, part in counts.items()}
    found[Site("v", 1)] = histogram({47: 10_000})
    gate = calibrated(found, floor=0.0)
    assert gate.borrowed == {X[1]: 1, X[2]: 2, X[3]: 1, X[4]: 1}
    assert gate.bands[X[0]] == UPPER_EDGES[30]
    assert gate.bands[X[1]] == UPPER_EDGES[34]  # layers 0, 1, 2: 653; 3 beyond bin 34 are .46%
    assert gate.bands[X[3]] == UPPER_EDGES[38]  # layers 2, 3, 4: 220
    assert gate.bands[X[4]] == UPPER_EDGES[40]  # layers 3, 4, 5: 370
    assert gate.bands[Site("v", 1)] == UPPER_EDGES[47]


def test_a_kind_with_too_few_borrows_from_all_and_without_any_disagreement_takes_the_floor():
    found = {X0: histogram({40: 30}), X1: histogram({40: 30}), K0: histogram({44: 170})}
    gate = calibrated(found)
    assert gate.borrowed == {X0: -1, X1: -1, K0: -1}
    assert set(gate.bands.values()) == {UPPER_EDGES[44]}
    few = calibrated({X0: histogram({40: 1}), K0: EMPTY})
    assert few.bands == {X0: UPPER_EDGES[40], K0: UPPER_EDGES[40]}
    none = calibrated({X0: EMPTY, K0: EMPTY}, floor=0.01)
    assert none.bands == {X0: 0.01, K0: 0.01} and len(none.borrowed) == 2


def test_refreshing_fades_the_old_and_keeps_what_was_not_measured():
    gate = calibrated({X0: histogram({40: 1000}), K0: histogram({36: 800})})
    same = gate.refreshed({}, momentum=0.5)
    assert same == gate
    once = gate.refreshed({X0: histogram({20: 1000}), X1: histogram({44: 400})}, momentum=0.5)
    assert once.histograms[X0] == histogram({20: 1000, 40: 500})
    assert once.bands == {X0: UPPER_EDGES[40], X1: UPPER_EDGES[44], K0: UPPER_EDGES[36]}
    later = once
    for _ in range(8):
        later = later.refreshed({X0: histogram({32: 1000})}, momentum=0.5)
    assert later.bands[X0] == UPPER_EDGES[32]  # what was measured before is 0.1% by now
    assert gate.refreshed({X0: histogram({32: 1000})}, momentum=0.0).histograms[X0] == histogram({32: 1000})
    with pytest.raises(ConfigError, match=r"momentum 1; it lies in \[0, 1\)"):
        gate.refreshed({}, momentum=1)


def test_the_state_is_plain_data_and_comes_back_exactly():
    gate = calibrated({X0: histogram({40: 700}), K0: histogram({36: 3})}, coverage=0.99)
    gate = gate.refreshed({X0: histogram({41: 100})}, momentum=0.3)
    back = NoiseGate.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert back == gate
    assert back.bands == gate.bands and back.borrowed == gate.borrowed
    with pytest.raises(RecordError, match="version is 0, this tracefp4 reads 1"):
        NoiseGate.load_state_dict({**gate.state_dict(), "version": 0})


def test_a_manifest_reads_bands_borrowing_and_noise():
    gate = calibrated({X0: histogram({40: 300}, values={40: 3000}), K0: histogram({36: 3}, values={40: 7})})
    text = json.loads(json.dumps(gate.describe()))
    assert text["bands"] == {"layers.0.k": UPPER_EDGES[40], "layers.0.x": UPPER_EDGES[40]}
    assert (text["num_sites"], text["num_borrowed"], text["borrowed"]) == (2, 1, {"layers.0.k": -1})
    assert (text["coverage"], text["floor"], text["cap"]) == (0.995, FLOOR, CAP)
    assert (text["num_disagreeing"], text["share_disagreeing"]) == (303, 303 / 3007)


@pytest.mark.parametrize(
    "options", [{"coverage": 1.0}, {"coverage": 0.0}, {"floor": -0.1}, {"floor": 0.3, "cap": 0.2}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="A noise gate cannot have coverage"):
        calibrated({X0: histogram({40: 1})}, **options)
    with pytest.raises(ConfigError, match="needs measurements; got none"):
        calibrated({})


LENGTH = 60


def replayed(x, *, codec="mantissa", bands=None):
    record = recorded(length=LENGTH, sites=(X0,))
    batch = ReplayBatch(
        positions=torch.arange(LENGTH)[None],
        records=[record.recode(codec)],
        references=[record],
        bands=bands,
    )
    with replay(batch):
        rounded = round_at(X0, x)
    return rounded, batch


def values(noise):
    x = activations(0, range(LENGTH))
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("codec", ["full", "low2", "mantissa", "secded", "bch32_2"])
def test_a_gate_calibrated_under_equal_weights_follows_less_and_loses_nothing(codec):
    # Mutations: bands of another site, or not passed on to the guide.
    x = values(0.004)
    _, open_batch = replayed(x, codec=codec)
    gate = calibrated(histograms(open_batch.counters))
    _, batch = replayed(x, codec=codec, bands=gate.bands)
    ungated, gated = (found.counters.sites[X0].resolved() for found in (open_batch, batch))
    assert ungated.values_in_band == LENGTH * 32
    assert 0.02 < gated.values_in_band / gated.values < 0.3
    assert gated.mismatched_before > 20
    # Outside the band lie at most 0.5% of the disagreements.
    assert gated.mismatched_after <= ungated.mismatched_after + 0.01 * gated.mismatched_before


def test_a_value_that_really_moved_is_seen_to_move():
    # The policy update of guidance section 2c in small: every value moves by 2% of its size.
    still = values(0.0)
    gate = calibrated(histograms(replayed(values(0.004))[1].counters))
    moved = still * 1.02
    own, ungated, gated = (replayed(moved, bands=bands)[0].values for bands in ({X0: 0.0}, None, gate.bands))
    there = round_at(X0, still).values
    shift = [(found - there).abs().sum() / (own - there).abs().sum() for found in (ungated, gated)]
    assert shift[0] < 0.1 and shift[1] > 0.4


def test_sites_without_a_band_have_no_gate():
    x = values(0.004)
    for bands in (None, {}, {X1: 0.0}):
        assert replayed(x, bands=bands)[1].guide(X0).band is None
    assert replayed(x, bands={X0: 0.05})[1].guide(X0).band == 0.05


def test_references_without_gate_or_guide_still_measure():
    record = recorded(length=4)
    batch = ReplayBatch(positions=torch.arange(4)[None], records=[None], references=[record], bands={X0: 0.1})
    with replay(batch):
        round_at(X0, values(0.01)[:4])
    counts = batch.counters.sites[X0]
    assert counts.values_in_band is None and counts.blocks_undecoded is None
    assert histograms(batch.counters)[X0].num_disagreeing > 0
    assert replace(counts, values_in_band=3).resolved().values_in_band == 3
