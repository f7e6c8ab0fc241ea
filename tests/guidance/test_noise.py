"""Histograms of boundary distances: the bins, which values are counted, and what replay puts into them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.guidance.sample_records import K0, X0, activations, recorded, round_at

from tracefp4.errors import RecordError
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.guidance import NoiseHistogram, ReplayBatch, histograms, merge_histograms
from tracefp4.guidance.counters import Reference
from tracefp4.guidance.noise import EMPTY, NUM_BINS, UPPER_EDGES, _bins, measure_noise
from tracefp4.guidance.session import replay
from tracefp4.ops.guided_quantize import boundary_distance, guided_quantize
from tracefp4.ops.quantize import quantize_with_scales

ONE = 0x38  # the E4M3 byte of 1.0


def histogram(disagreeing, values=None):
    """A histogram from {bin: count}."""
    dense = [
        tuple(float(part.get(i, 0)) for i in range(NUM_BINS)) for part in (values or disagreeing, disagreeing)
    ]
    return NoiseHistogram(values=dense[0], disagreeing=dense[1])


def noisy(positions, *, site=X0, noise=0.01):
    x = activations(0, positions, site=site)
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(9))


def test_edges_are_four_to_an_octave_up_to_the_largest_distance():
    assert len(UPPER_EDGES) == NUM_BINS == 57
    assert (UPPER_EDGES[0], UPPER_EDGES[4], UPPER_EDGES[-5:]) == (
        2**-14,
        2**-13,
        (0.5, 0.625, 0.75, 0.875, 1.0),
    )
    assert all(1 < b / a <= 1.25 for a, b in pairwise(UPPER_EDGES))


def test_bins_read_off_the_bits_are_those_of_a_search_among_the_edges():
    # Every edge and its float32 neighbours, the ends, and random distances. Mutation: edges in the bin above.
    edges = torch.tensor(UPPER_EDGES)
    random = torch.rand(4000, generator=torch.Generator().manual_seed(0)) ** 8
    d = torch.cat([edges, torch.nextafter(edges, edges * 0), torch.nextafter(edges[:-1], edges[1:]), random])
    d = torch.cat([d, torch.tensor([0.0, 1e-45, torch.inf])])
    assert torch.equal(_bins(d), torch.bucketize(d, edges))
    assert _bins(torch.tensor([torch.inf])).item() == NUM_BINS


def test_values_fall_into_the_bin_of_their_distance_edges_included():
    # Scale 1: z = x. Distances 2^-14 (bin 0), just above it (bin 1), 0.25 (edge of bin 48), 1 at z = 6 (the last bin).
    z = torch.tensor([[0.25 - 2**-14, 0.25 + 2**-13.9, 0.5, 6.0, -6.0, 1e9, *[0.0] * 10]])
    codes = guided_quantize(z, scheme=NVFP4_KV, exponent=0).codes * 0
    reference = Reference(
        codes=codes,
        block_scales=torch.tensor([[ONE]], dtype=torch.uint8),
        exponent=None,
        valid=torch.tensor([True]),
        part=None,
    )
    outer = torch.zeros((), dtype=torch.int8)
    found = measure_noise(z, scheme=NVFP4_KV, outer=outer, reference=reference)
    assert found.shape == (2, NUM_BINS) and found.dtype == torch.int64
    counts = {i: int(n) for i, n in enumerate(found[0]) if n}
    assert counts == {0: 1, 1: 1, 48: 1 + 10, NUM_BINS - 1: 3}
    # Codes other than 0: 0.25 + 2^-13.9 and 0.5 round to code 1, the ends to 7.
    assert {i: int(n) for i, n in enumerate(found[1]) if n} == {1: 1, 48: 1, NUM_BINS - 1: 3}


@pytest.mark.parametrize("site", [X0, K0], ids=str)
def test_what_replay_counts_is_what_a_loop_over_the_values_counts(site):
    record = recorded(length=12, sites=(X0, K0))
    record = replace(record, valid=torch.arange(12) != 4)
    positions = torch.tensor([[*range(13), -1, -1]])
    x = noisy([*range(13), 0, 1], site=site)
    batch = ReplayBatch(positions=positions, records=[record], references=[record])
    with replay(batch):
        round_at(site, x)
    part, scheme = record.sites[site], NVFP4_ROW_POW2 if site is X0 else NVFP4_KV
    outer = torch.tensor(-2, dtype=torch.int8) if part.exponent is None else part.exponent
    scales = {"block_scales": part.block_scales, "outer": outer, "scheme": scheme}
    distance = boundary_distance(x[:12], **scales)
    nearest, recorded_codes = quantize_with_scales(x[:12], **scales).codes(), part.codes()
    expected = [[0.0] * NUM_BINS, [0.0] * NUM_BINS]
    for row in set(range(12)) - {4}:
        for d, own, other in zip(distance[row], nearest[row], recorded_codes[row], strict=True):
            at = next(i for i, edge in enumerate(UPPER_EDGES) if float(d) <= edge)
            expected[0][at] += 1
            expected[1][at] += int(own) != int(other) and (int(own) | int(other)) & 7 != 0
    found = histograms(batch.counters)[site]
    assert [list(found.values), list(found.disagreeing)] == expected
    assert 0 < found.num_disagreeing < sum(found.values) == 11 * 32


def test_equal_values_do_not_disagree_and_the_rollouts_scales_are_used():
    # A larger own scale everywhere: under the recorded scales the codes are still the recorded ones.
    record = recorded(length=6)
    x = activations(0, range(6))
    batch = ReplayBatch(positions=torch.arange(6)[None], records=[None], references=[record])
    with replay(batch):
        round_at(X0, x)
    found = histograms(batch.counters)[X0]
    assert (found.num_disagreeing, found.share_disagreeing) == (0, 0)
    batch = ReplayBatch(positions=torch.arange(6)[None], records=[None], references=[record])
    with replay(batch):
        round_at(X0, x * 1.5)
    assert histograms(batch.counters)[X0].share_disagreeing > 0.3


def test_blocks_without_a_usable_scale_are_in_no_bin():
    record = recorded(length=2, sites=(X0,))
    part = record.sites[X0]
    scales = part.block_scales.clone()
    scales[0, 0], scales[1, 1] = 0, 0x7F
    whole = replace(record, sites={X0: replace(part, block_scales=scales)})
    x = activations(0, range(2))
    x[1, 0] = torch.inf
    batch = ReplayBatch(positions=torch.arange(2)[None], records=[None], references=[whole])
    with replay(batch):
        round_at(X0, x)
    assert sum(histograms(batch.counters)[X0].values) == 16


def test_recomputation_counts_once_and_batches_add():
    record = recorded(length=8)
    parts = []
    for span in (range(5), range(5, 8)):
        batch = ReplayBatch(positions=torch.tensor([list(span)]), records=[record], references=[record])
        with replay(batch):
            for _ in range(2):
                round_at(X0, noisy(range(8))[list(span)])
        parts.append(histograms(batch.counters))
    whole = ReplayBatch(positions=torch.arange(8)[None], records=[record], references=[record])
    with replay(whole):
        round_at(X0, noisy(range(8)))
    assert merge_histograms(parts) == histograms(whole.counters)
    assert merge_histograms([]) == {}


@given(st.dictionaries(st.integers(0, NUM_BINS - 1), st.integers(1, 50), min_size=1), st.floats(0.01, 1))
def test_the_distance_covering_a_share_is_the_first_edge_that_does(counts, coverage):
    found = histogram(counts)
    edge = found.distance_covering(coverage)
    at = UPPER_EDGES.index(edge)
    below = [sum(n for i, n in counts.items() if i <= last) for last in (at - 1, at)]
    assert below[0] < coverage * sum(counts.values()) <= below[1]


def test_nothing_counted_covers_nothing():
    assert EMPTY.distance_covering(0.5) is None
    assert EMPTY.share_disagreeing == 0
    assert histogram({3: 2}, values={3: 8}).share_disagreeing == 0.25
    with pytest.raises(RecordError, match="57 bins; got 2 and 57"):
        NoiseHistogram(values=(0.0, 1.0), disagreeing=EMPTY.disagreeing)


def test_old_counts_may_be_weighted_down():
    found = histogram({1: 4}, values={1: 8}).weighted(0.5, plus=histogram({2: 1}))
    assert found == histogram({1: 2, 2: 1}, values={1: 4, 2: 1})
