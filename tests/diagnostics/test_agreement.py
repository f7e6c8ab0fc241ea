"""Rates of equal codes, from counters of replayed batches."""

import pytest
import torch

from tracefp4.diagnostics.agreement import (
    AgreementCounts,
    RoutingAgreement,
    agreement_metrics,
    by_kind,
    by_layer,
    collect_routing,
    collect_sites,
    merge_routing,
    merge_sites,
    total,
)
from tracefp4.errors import ConfigError
from tracefp4.guidance.counters import Counters, RoutingCounts, SiteCounts, num_mismatched
from tracefp4.guidance.record import Site

X0, X1, K1 = ("x", 0), ("x", 1), ("k", 1)


def counters(scale=1):
    measured = SiteCounts(
        values=64 * scale,
        positions=4,
        positions_guided=3 * scale,
        positions_missing=1 * scale,
        values_changed=torch.tensor(4 * scale),
        values_compared=48 * scale,
        mismatched_before=torch.tensor(12 * scale),
        mismatched_after=3 * scale,
        blocks_compared=3 * scale,
        blocks_mismatched=1 * scale,
        values_clipped=torch.tensor(2 * scale),
        values_in_band=torch.tensor(16 * scale),
        syndrome_blocks=8 * scale,
        blocks_undecoded=torch.tensor(1 * scale),
    )
    unmeasured = SiteCounts(values=32, positions=4, positions_guided=0, positions_missing=4, values_changed=0)
    routing = RoutingCounts(positions=4, positions_replayed=torch.tensor(3), positions_changed=1)
    return Counters(sites={Site(*X0): measured, Site(*K1): unmeasured}, routing={0: routing})


def test_counters_become_rates_and_what_was_not_measured_is_left_out():
    found = counters()
    metrics = agreement_metrics(collect_sites(found), routing=collect_routing(found))
    assert metrics["agreement/x/layer_0/mismatch_before"] == 12 / 48
    assert metrics["agreement/x/layer_0/mismatch_after"] == 3 / 48
    assert metrics["agreement/x/layer_0/scale_mismatch"] == 1 / 3
    assert metrics["agreement/x/layer_0/changed"] == 4 / 64
    assert metrics["agreement/x/layer_0/clipped"] == 2 / 64
    assert metrics["agreement/x/layer_0/followed"] == metrics["agreement/followed"] == 16 / 64
    assert metrics["agreement/x/layer_0/undecoded"] == 1 / 8
    assert not {
        "agreement/k/layer_1/clipped",
        "agreement/k/layer_1/followed",
        "agreement/k/layer_1/undecoded",
    } & set(metrics)
    assert metrics["agreement/k/layer_1/missing"] == 1.0
    assert "agreement/k/layer_1/mismatch_before" not in metrics
    assert metrics["agreement/missing"] == 5 / 8
    assert metrics["agreement/routing/replayed"] == 3 / 4
    assert metrics["agreement/routing/layer_0/changed"] == 1 / 3


def test_merging_adds_counts_and_does_not_average_rates():
    small, large = collect_sites(counters()), collect_sites(counters(9))
    merged = merge_sites([small, {X1: AgreementCounts(values=10)}, large])
    assert merged[X0].compared == 480
    assert merged[X0].rates()["mismatch_before"] == 120 / 480
    assert merged[X1].values == 10
    reverse = merge_sites([large, small, {X1: AgreementCounts(values=10)}])
    assert agreement_metrics(reverse) == agreement_metrics(merged)
    assert merge_sites([]) == {}
    routing = merge_routing([collect_routing(counters())] * 2)
    assert routing == {0: RoutingAgreement(positions=8, positions_replayed=6, positions_changed=2)}


def test_sums_by_layer_and_kind():
    counts = {X0: AgreementCounts(values=1), X1: AgreementCounts(values=2), K1: AgreementCounts(values=4)}
    assert {layer: part.values for layer, part in by_layer(counts).items()} == {0: 1, 1: 6}
    assert {kind: part.values for kind, part in by_kind(counts).items()} == {"x": 3, "k": 4}
    assert total(counts).values == 7


def test_nothing_counted_gives_no_rate():
    assert agreement_metrics({}) == {}


def test_the_two_zeros_are_equal_and_everything_else_by_code():
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = [(a, b) for a in range(16) for b in range(16)]
    mine, other = (torch.tensor([pair[side] for pair in pairs], dtype=torch.uint8)[None] for side in range(2))
    assert num_mismatched(mine, other, valid=torch.tensor([True])).item() == 16 * 15 - 2
    assert num_mismatched(codes[None], codes[None], valid=torch.tensor([True])).item() == 0


def test_more_mismatches_than_comparisons_are_refused():
    with pytest.raises(ConfigError, match=r"mismatched_after .* got 3; allowed is 0 \.\. 2"):
        AgreementCounts(compared=2, mismatched_after=3)


def test_a_site_with_no_value_in_the_band_followed_nothing_and_an_unguided_one_has_no_share():
    counts = {
        "values": 32,
        "positions": 2,
        "positions_guided": 2,
        "positions_missing": 0,
        "values_changed": 0,
    }
    closed = AgreementCounts.from_site(SiteCounts(**counts, values_in_band=torch.tensor(0)))
    assert closed.rates()["followed"] == 0.0
    assert "followed" not in AgreementCounts.from_site(SiteCounts(**counts)).rates()
    with pytest.raises(ConfigError, match=r"in_band .* got 33; allowed is 0 \.\. 32"):
        AgreementCounts(guidable=32, in_band=33)
