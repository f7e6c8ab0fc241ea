from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guidance.sample_records import (
    K0,
    NUM_EXPERTS,
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
from torch.utils._python_dispatch import TorchDispatchMode

from tracefp4.coding import CODECS
from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.packing import pack_codes
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.guidance import (
    ReplayBatch,
    SequenceRows,
    StepLog,
    record_from_bytes,
    record_to_bytes,
    route_site,
)
from tracefp4.guidance.columns import columns_to_record, record_to_columns
from tracefp4.guidance.session import record, replay
from tracefp4.ops.guided_quantize import guided_quantize

LENGTHS = (10, 6, 8)


def padded_positions(side: str, *, extra: int = 0) -> torch.Tensor:
    columns = max(LENGTHS) + 1 + extra
    positions = torch.full((len(LENGTHS), columns), -1)
    for row, length in enumerate(LENGTHS):
        first = columns - (length + 1) if side == "left" else 0
        positions[row, first : first + length + 1] = torch.arange(length + 1)
    return positions


def batch_values(positions: torch.Tensor, *, site=X0, noise: float = 0.0, rows: int = 1) -> torch.Tensor:
    """The trainer's values: the rollout's, plus relative noise; padding holds something else."""
    parts = []
    for row in range(positions.shape[0]):
        for position in positions[row].tolist():
            parts.append(activations(row if position >= 0 else 77, [abs(position)], site=site, rows=rows))
    x = torch.cat(parts)
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def sample_records(codec: str = "full"):
    return [recorded(row, length=length).recode(codec) for row, length in enumerate(LENGTHS)]


def decisions(guide):
    return next(part for part in (guide.codes, guide.bits, guide.syndromes) if part is not None)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("site", [X0, K0], ids=str)
def test_replaying_equal_values_changes_nothing(codec, side, site):
    positions = padded_positions(side)
    batch = ReplayBatch(positions=positions, records=sample_records(codec), references=sample_records())
    x = batch_values(positions, site=site)
    with replay(batch):
        guided = round_at(site, x)
    live = round_at(site, x)
    assert torch.equal(guided.values, live.values)
    assert torch.equal(guided.codes, live.codes)
    counts = batch.counters.sites[site].resolved()
    assert counts.positions == sum(LENGTHS) + len(LENGTHS)
    assert counts.positions_guided == sum(LENGTHS)
    assert counts.positions_missing == len(LENGTHS)
    assert counts.values_compared == sum(LENGTHS) * x.shape[1]
    assert (counts.values_changed, counts.mismatched_before, counts.mismatched_after) == (0, 0, 0)
    assert counts.blocks_mismatched == 0
    assert counts.values_in_band == sum(LENGTHS) * x.shape[1]
    assert counts.blocks_undecoded == 0


@pytest.mark.parametrize("codec", ["full", "low2", "mantissa", "mantissa_lean", "secded", "bch64_3"])
def test_guidance_removes_the_mismatch_that_noise_makes(codec):
    positions = padded_positions("right")
    batch = ReplayBatch(positions=positions, records=sample_records(codec), references=sample_records())
    with replay(batch):
        round_at(X0, batch_values(positions, noise=0.003))
    counts = batch.counters.sites[X0].resolved()
    assert counts.mismatched_before > 0
    assert counts.mismatched_after == 0
    assert counts.values_changed > 0


@pytest.mark.parametrize(("name", "blocks"), [("full", 0), ("secded", 2), ("bch32_2+parity4", 1 + 1)])
def test_syndrome_blocks_are_those_of_guided_rows(name, blocks):
    # Width 32, two block scales; w2 has TOP_K rows a token. Mutation: padding or rows without a record counted.
    positions = padded_positions("right", extra=2)
    batch = ReplayBatch(positions=positions, records=[*sample_records(name)[:2], None])
    for site, rows in ((X0, 1), (W0, TOP_K)):
        with replay(batch):
            round_at(site, batch_values(positions, site=site, rows=rows))
        counts = batch.counters.sites[site].resolved()
        assert counts.syndrome_blocks == blocks * rows * sum(LENGTHS[:2])
        assert counts.values_in_band == rows * sum(LENGTHS[:2]) * 32


def test_syndrome_blocks_that_no_small_change_explains_are_counted_and_stay_nearest():
    # Records of other trajectories: half of all bits differ.
    positions = padded_positions("right")
    strangers = [recorded(row + 50, length=n, sites=(X0,)) for row, n in enumerate(LENGTHS)]
    batch = ReplayBatch(
        positions=positions, records=[r.recode("bch32_2+raw") for r in strangers], references=strangers
    )
    with replay(batch):
        round_at(X0, batch_values(positions))
    counts = batch.counters.sites[X0].resolved()
    assert 0 < counts.blocks_undecoded < counts.syndrome_blocks == sum(LENGTHS)


@pytest.mark.parametrize(("codec", "share"), [("full", 0.3), ("mantissa", 0.3), ("secded", 0.15)])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_record_shifted_by_one_position_is_seen_by_the_counters(codec, share, shift):
    positions = padded_positions("right")
    shifted = [
        replace(record, start=1) if shift == 1 else replace(record.rows(1, record.length), start=0)
        for record in sample_records(codec)
    ]
    seen = {}
    for name, records in (("aligned", sample_records(codec)), ("shifted", shifted)):
        batch = ReplayBatch(positions=positions, records=records, references=sample_records())
        with replay(batch):
            round_at(X0, batch_values(positions, noise=0.003))
            route_site(0, router_logits(0, range(positions.numel())), top_k=TOP_K)
        seen[name] = batch.counters.sites[X0].resolved()
    assert seen["aligned"].mismatched_after == 0
    assert seen["shifted"].mismatched_after > share * seen["shifted"].values_compared
    assert seen["shifted"].values_changed > 10 * seen["aligned"].values_changed


def test_places_without_a_decision_are_invalid():
    first, second = recorded(0, length=4, start=2), recorded(1, length=3)
    second = replace(second, valid=torch.tensor([True, False, True]))
    positions = torch.tensor([[0, 1, 2, 5, 6], [-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    batch = ReplayBatch(positions=positions, records=[first, second, None])
    guide = batch.guide(X0)
    assert guide.valid.view(3, 5).tolist() == [
        [False, False, True, True, False],
        [False, True, False, True, False],
        [False] * 5,
    ]
    own = round_at(X0, activations(0, [5]))
    assert torch.equal(guide.codes[3], own.codes[0])
    ids, valid = batch.routing(0)
    assert ids.shape == (15, TOP_K)
    assert torch.equal(valid, guide.valid)


def test_a_site_that_some_records_lack_is_missing_there():
    with_both, only_x1 = recorded(0, length=4, sites=(X0, X1)), recorded(1, length=4, sites=(X1,))
    batch = ReplayBatch(positions=torch.arange(4).repeat(2, 1), records=[only_x1, with_both])
    assert batch.guide(X0).valid.tolist() == [False] * 4 + [True] * 4
    assert batch.guide(X1).valid.all()
    assert torch.equal(batch.guide(X0).codes[4:], round_at(X0, activations(0, range(4))).codes)
    assert batch.guide(K0) is None


def test_micro_batch_order_and_repeated_questions_do_not_matter():
    records = sample_records()
    positions = padded_positions("right")
    whole = ReplayBatch(positions=positions, records=records).guide(X0)
    columns = positions.shape[1]
    for row in (2, 0, 1, 2):
        part = ReplayBatch(positions=positions[row : row + 1], records=[records[row]])
        for _ in range(2):
            guide = part.guide(X0)
            span = slice(row * columns, (row + 1) * columns)
            assert torch.equal(guide.valid, whole.valid[span])
            assert torch.equal(guide.codes[guide.valid], whole.codes[span][guide.valid])


def test_packed_rows_address_records_by_index():
    records = sample_records()
    positions = torch.tensor([[0, 1, 2, 0, 1, -1, 4]])
    owners = torch.tensor([[2, 2, 2, 0, 0, -1, 1]])
    batch = ReplayBatch(positions=positions, records=records, record_index=owners)
    guide = batch.guide(X0)
    assert guide.valid.tolist() == [True] * 5 + [False, True]
    for place, (owner, position) in enumerate(zip(owners[0].tolist(), positions[0].tolist(), strict=True)):
        if owner >= 0:
            assert torch.equal(guide.codes[place], round_at(X0, activations(owner, [position])).codes[0])
    with pytest.raises(RecordError, match="got 3 records"):
        ReplayBatch(positions=positions, records=records, record_index=owners + 1)


@pytest.mark.parametrize("codec", CODECS)
def test_pad_6_left_padding_by_three_leaves_every_decision_where_it_was(codec):
    record = recorded(length=6).recode(codec)
    alone = ReplayBatch(positions=torch.arange(7)[None], records=[record])
    padded = ReplayBatch(positions=torch.cat([torch.full((3,), -1), torch.arange(7)])[None], records=[record])
    for site in (X0, K0):
        first, second = alone.guide(site), padded.guide(site)
        assert not second.valid[:3].any()
        assert torch.equal(second.valid[3:], first.valid)
        assert torch.equal(decisions(second)[3:9], decisions(first)[:6])
        assert torch.equal(second.block_scales[3:9], first.block_scales[:6])


@pytest.mark.parametrize(
    "parts", [([0, 1, 6, 7], [2, 3, 4, 5]), ([0, 1, 2, 3], [4, 5, 6, 7])], ids=["zigzag", "contiguous"]
)
@pytest.mark.parametrize("codec", ["full", "mantissa_lean", "secded"])
def test_pad_5_records_follow_whatever_split_the_positions_follow(parts, codec):
    record = recorded(length=8).recode(codec)
    whole = ReplayBatch(positions=torch.arange(8)[None], records=[record]).guide(X0)
    for part in parts:
        own = ReplayBatch(positions=torch.tensor([part]), records=[record]).guide(X0)
        assert torch.equal(decisions(own), decisions(whole)[part])
        assert torch.equal(own.block_scales, whole.block_scales[part])


@settings(max_examples=25, deadline=None)
@given(
    noise=st.floats(0, 0.2),
    trajectory=st.integers(0, 20),
    decoder=st.sampled_from(["bracket", "nearest_cell"]),
)
def test_a_recoded_record_guides_as_bits_taken_directly(noise, trajectory, decoder):
    record = recorded(trajectory, length=5, sites=(X0,), routed_layers=())
    x = activations(trajectory, range(5))
    x = x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(trajectory))
    full = ReplayBatch(positions=torch.arange(5)[None], records=[record]).guide(X0)
    direct = guided_quantize(
        x, scheme=NVFP4_ROW_POW2, guide=replace(full, codes=None, bits=full.codes & 1, decoder=decoder)
    )
    recoded = record_from_bytes(record_to_bytes(record.recode("mantissa")))
    with replay(ReplayBatch(positions=torch.arange(5)[None], records=[recoded], decoder=decoder)):
        found = round_at(X0, x)
    assert torch.equal(found.values, direct.values)
    assert torch.equal(found.codes, direct.codes)
    assert int(found.nearest_changed) == int(direct.nearest_changed)


def test_down_projection_rows_belong_to_token_and_slot():
    positions = padded_positions("left")
    batch = ReplayBatch(positions=positions, records=sample_records(), references=sample_records())
    x = batch_values(positions, site=W0, rows=TOP_K)
    with replay(batch):
        guided = round_at(W0, x)
    assert torch.equal(guided.codes, round_at(W0, x).codes)
    counts = batch.counters.sites[W0].resolved()
    assert counts.positions_guided == sum(LENGTHS)
    assert counts.values_compared == sum(LENGTHS) * TOP_K * x.shape[1]
    assert counts.mismatched_after == 0
    with pytest.raises(ConfigError, match="replay_routing False"):
        ReplayBatch(positions=positions, records=sample_records(), replay_routing=False)
    ReplayBatch(positions=positions, records=sample_records(), replay_routing=False, sites=[X0])


def test_only_the_chosen_sites_are_guided():
    batch = ReplayBatch(positions=torch.arange(4)[None], records=[recorded(length=4)], sites=[X1])
    assert batch.guide(X0) is None
    assert batch.guide(X1) is not None


def test_agreement_is_measured_without_guidance_too():
    positions = padded_positions("right")
    batch = ReplayBatch(positions=positions, records=[None] * 3, references=sample_records())
    with replay(batch):
        round_at(X0, batch_values(positions, noise=0.003))
    counts = batch.counters.sites[X0].resolved()
    assert counts.positions_guided == 0
    assert counts.mismatched_before == counts.mismatched_after > 0


def test_recomputation_does_not_count_twice_and_totals_add_sites():
    positions = padded_positions("right")
    batch = ReplayBatch(positions=positions, records=sample_records(), references=sample_records())
    x = batch_values(positions, noise=0.003)
    with replay(batch):
        round_at(X0, x)
        once = batch.counters.total()
        round_at(X0, x)
        assert batch.counters.total() == once
        round_at(X1, batch_values(positions, site=X1, noise=0.003))
    total = batch.counters.total()
    parts = [batch.counters.sites[site].resolved() for site in (X0, X1)]
    assert total.mismatched_before == sum(part.mismatched_before for part in parts)
    assert total.values == 2 * once.values


def test_without_references_nothing_is_compared():
    batch = ReplayBatch(positions=torch.arange(4)[None], records=[recorded(length=4)])
    with replay(batch):
        round_at(X0, activations(0, range(4)))
    assert batch.counters.sites[X0].mismatched_before is None
    assert batch.counters.total().values_compared is None


def test_zero_and_negative_zero_are_equal_in_counts():
    record = recorded(length=6)
    codes = record.sites[X0].codes()
    is_zero = (codes & 7) == 0
    assert is_zero.any()
    payload = pack_codes(torch.where(is_zero, codes ^ 8, codes))
    reference = replace(record, sites={X0: replace(record.sites[X0], payload=payload)})
    batch = ReplayBatch(positions=torch.arange(6)[None], records=[record], references=[reference])
    with replay(batch):
        round_at(X0, activations(0, range(6)))
    assert batch.counters.total().mismatched_before == 0
    assert batch.counters.total().mismatched_after == 0


def test_a_batch_of_another_size_raises():
    batch = ReplayBatch(positions=torch.arange(4)[None], records=[recorded(length=4)])
    with replay(batch):
        with pytest.raises(RecordError, match=r"got 3 rows.*4 places"):
            round_at(X0, activations(0, range(3)))
        with pytest.raises(RecordError, match="does not fit the replayed batch"):
            route_site(0, torch.zeros(3, NUM_EXPERTS), top_k=TOP_K)
        with pytest.raises(RecordError, match="does not fit the replayed batch"):
            route_site(0, torch.zeros(4, NUM_EXPERTS), top_k=3)
    with pytest.raises(RecordError, match="got 2 records"):
        ReplayBatch(positions=torch.arange(4)[None], records=[None, None])


def test_records_that_do_not_belong_together_raise():
    positions = torch.arange(4).repeat(2, 1)
    full, lean = recorded(0, length=4), recorded(1, length=4).recode("mantissa")
    with pytest.raises(RecordError, match=r"differ at layers\.0\.x"):
        ReplayBatch(positions=positions, records=[full, lean]).guide(X0)
    other = replace(lean, identity=replace(lean.identity, plan_digest="other"))
    with pytest.raises(RecordError, match="different rules"):
        ReplayBatch(positions=positions, records=[lean, other])
    foreign = replace(full, identity=replace(full.identity, scheme_digest="other"))
    # Mutation: references are not looked at; agreement would compare codes of two schemes.
    for records, references in (([full, None], [foreign, None]), ([None, None], [full, foreign])):
        with pytest.raises(
            RecordError, match=r"different rules; got.*'other'.*of references\. All must be equal"
        ):
            ReplayBatch(positions=positions, records=records, references=references)
    with pytest.raises(RecordError, match="codec 'mantissa'"):
        ReplayBatch(positions=positions, records=[full, None], references=[lean, None]).reference(X0)


def test_another_static_exponent_raises():
    record = recorded(length=4)
    moved = replace(record, sites={K0: replace(record.sites[K0], static_exponent=5)})
    batch = ReplayBatch(positions=torch.arange(4)[None], records=[moved])
    with replay(batch), pytest.raises(RecordError, match=r"its exponent is 5, this side's is -2"):
        round_at(K0, activations(0, range(4), site=K0))


def test_records_read_from_bytes_guide_the_same():
    record = recorded(length=5)
    back = record_from_bytes(record_to_bytes(record.recode("mantissa")))
    positions = torch.arange(5)[None]
    first = ReplayBatch(positions=positions, records=[record.recode("mantissa")]).guide(X0)
    second = ReplayBatch(positions=positions, records=[back]).guide(X0)
    assert torch.equal(first.bits, second.bits)
    assert torch.equal(first.block_scales, second.block_scales)
    assert torch.equal(first.outer, second.outer)


def test_empty_batches_and_empty_records_are_fine():
    batch = ReplayBatch(positions=torch.zeros(1, 0, dtype=torch.int64), records=[recorded(length=0)])
    with replay(batch):
        assert round_at(X0, torch.zeros(0, 32)).values.shape == (0, 32)
        assert route_site(0, torch.zeros(0, NUM_EXPERTS), top_k=TOP_K).shape == (0, TOP_K)
    assert batch.counters.total().values == 0


@pytest.mark.parametrize("codec", ["full", "mantissa_lean", "secded", "bch256_3+bch128_2"])
def test_records_and_replay_ignore_the_default_device(codec):
    # Mutation: torch.tensor(starts) without a device in gather, torch.empty without one in a compiled op.
    positions, seen = torch.tensor([[2, 3, 4, -1]]), range(6)
    inputs = [(X0, activations(0, seen)), (W0, activations(0, seen, site=W0, rows=TOP_K))]
    logits = router_logits(0, seen)
    found = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            log = StepLog(
                sites=[X0, W0], codecs={X0: codec, W0: codec}, routed_layers=[0], num_experts=NUM_EXPERTS
            )
            log.begin_step(num_tokens=6)
            with record(log):
                _ = [round_at(site, x) for site, x in inputs], route_site(0, logits, top_k=TOP_K)
            log.end_step()
            made = log.build([SequenceRows(identity=identity(), rows=list(seen))])[0]
            made = columns_to_record(record_to_columns(record_from_bytes(record_to_bytes(made))))
            batch = ReplayBatch(positions=positions, records=[made])
            with replay(batch):
                values = [
                    round_at(site, 1.01 * x[: 4 * made.sites[site].rows_per_token]).values
                    for site, x in inputs
                ]
                found[device] = [*values, route_site(0, logits[:4], top_k=TOP_K)]
        assert batch.counters.total().positions_guided == 6
    assert all(torch.equal(a, b) for a, b in zip(found["cpu"], found["meta"], strict=True))


def test_the_counts_of_a_site_are_read_from_a_device_at_once():
    # Mutation: int() of every count: one wait for the device per count, site and micro-batch.
    batch = ReplayBatch(
        positions=torch.arange(6)[None], records=[recorded(length=6)], references=[recorded(length=6)]
    )
    with replay(batch):
        round_at(X0, 1.01 * activations(0, range(6)))
    counts, reads = batch.counters.sites[X0], []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            reads.extend([func.__name__] if "_local_scalar_dense" in func.__name__ else [])
            return func(*args, **(kwargs or {}))

    with Reads():
        found = counts.resolved()
    num_tensors = sum(isinstance(getattr(counts, item.name), torch.Tensor) for item in fields(counts))
    assert len(reads) <= 1 < num_tensors
    assert all(getattr(found, f.name) == getattr(counts, f.name) for f in fields(counts))
    assert not any(isinstance(getattr(found, item.name), torch.Tensor) for item in fields(found))
