from dataclasses import replace

import pytest
import torch
from tests.guidance.sample_records import (
    NUM_EXPERTS,
    TOP_K,
    X0,
    activations,
    identity,
    recorded,
    round_at,
    router_logits,
)

from tracefp4.coding import expert_id_bytes
from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.schemes import NVFP4_ROW_POW2, NVFP4_STATIC_POW2
from tracefp4.guidance import ReplayBatch, SequenceRows, StepLog, records_equal, round_site, route_site
from tracefp4.guidance.codec import record_from_bytes, record_to_bytes
from tracefp4.guidance.rounding import spread_ids
from tracefp4.guidance.session import record as record_to
from tracefp4.guidance.session import replay


def routed_record(expert_ids):
    routed = torch.tensor(expert_ids, dtype=torch.int16)[:, None]
    return replace(recorded(length=len(expert_ids), sites=(), routed_layers=(0,)), routed=routed)


@pytest.mark.parametrize(
    "scores",
    [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 1.0]],
)
def test_moe_1_equal_scores_go_to_the_lowest_ids(scores):
    assert route_site(0, torch.tensor([scores]), top_k=2).tolist() == [[0, 1]]


def test_moe_1_scores_that_collide_in_bf16_go_to_the_lowest_id():
    scores = torch.tensor([[0.5, 1.0, 1.001, 1.002]]).bfloat16().float()
    assert route_site(0, scores, top_k=2).tolist() == [[1, 2]]


def test_moe_1_recorded_ids_win_in_their_own_order():
    batch = ReplayBatch(positions=torch.arange(2)[None], records=[routed_record([[3, 1], [2, 0]])])
    with replay(batch):
        ids = route_site(0, torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 0]]), top_k=2)
    assert ids.tolist() == [[3, 1], [2, 0]]
    counts = batch.counters.routing[0]
    assert (counts.positions, int(counts.positions_replayed), int(counts.positions_changed)) == (2, 2, 2)


def test_pad_1_padding_rows_spread_over_all_experts():
    real = [[1, 5], [2, 6], [0, 7]]
    positions = torch.tensor([[-1, -1, -1, -1, 0, 1, 2, -1, -1, -1, -1]])
    batch = ReplayBatch(positions=positions, records=[routed_record(real)])
    with replay(batch):
        ids = route_site(0, torch.zeros(11, 8), top_k=2)
    assert ids[4:7].tolist() == real
    padding = ids[batch.positions[0] < 0]
    assert all(len(set(row)) == 2 for row in padding.tolist())
    assert padding.reshape(-1).bincount(minlength=8).tolist() == [2] * 8
    assert batch.counters.routing[0].positions == 3


def test_pad_1_a_real_position_without_a_record_is_routed_live():
    logits = router_logits(5, range(4))
    live = route_site(0, logits, top_k=TOP_K)
    batch = ReplayBatch(positions=torch.tensor([[0, 1, 2, -1]]), records=[routed_record([[4, 2], [1, 0]])])
    with replay(batch):
        ids = route_site(0, logits, top_k=TOP_K)
    assert ids[:2].tolist() == [[4, 2], [1, 0]]
    assert torch.equal(ids[2], live[2])
    assert ids[3].tolist() == [0, 1]


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (8, 8), (6, 4), (5, 3)])
def test_spread_ids_are_distinct_in_range_and_even(num_experts, top_k):
    ids = spread_ids(torch.arange(40), num_experts=num_experts, top_k=top_k)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    counts = ids.reshape(-1).bincount(minlength=num_experts)
    assert counts.shape[0] == num_experts
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize("expert_ids", [[[3, 8]], [[-1, 2]], [[2, 2]], [[0, 0]]])
def test_moe_3_impossible_recorded_ids_raise_when_replayed(expert_ids):
    batch = ReplayBatch(positions=torch.arange(1)[None], records=[routed_record(expert_ids)])
    with replay(batch), pytest.raises(RecordError, match="impossible expert ids at position 0, layer 0"):
        route_site(0, torch.zeros(1, NUM_EXPERTS), top_k=2)


def test_moe_3_ids_are_checked_against_this_model():
    record = routed_record([[3, 7]])
    with replay(ReplayBatch(positions=torch.arange(1)[None], records=[record])):
        assert route_site(0, torch.zeros(1, 8), top_k=2).tolist() == [[3, 7]]
        with pytest.raises(RecordError, match=r"0\.\.5"):
            route_site(0, torch.zeros(1, 6), top_k=2)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_router_cannot_choose_more_experts_than_there_are(top_k):
    with pytest.raises(ConfigError, match=f"cannot choose {top_k} of 4"):
        route_site(0, torch.zeros(1, 4), top_k=top_k)


def test_routing_replay_can_be_switched_off():
    logits = router_logits(3, range(2))
    batch = ReplayBatch(
        positions=torch.arange(2)[None], records=[routed_record([[4, 2], [1, 0]])], replay_routing=False
    )
    with replay(batch):
        assert torch.equal(route_site(0, logits, top_k=TOP_K), route_site(0, logits.clone(), top_k=TOP_K))
        assert int(batch.counters.routing[0].positions_replayed) == 0
    assert torch.equal(route_site(0, logits, top_k=TOP_K), logits.sort(descending=True).indices[:, :TOP_K])


def test_rpl_5_without_a_session_nothing_is_looked_up():
    x, logits = activations(0, range(4)), router_logits(0, range(4))
    before = round_at(X0, x), route_site(0, logits, top_k=TOP_K)
    with replay(ReplayBatch(positions=torch.arange(4)[None], records=[recorded(length=4)])):
        round_at(X0, x)
    after = round_at(X0, x), route_site(0, logits, top_k=TOP_K)
    assert torch.equal(before[0].values, after[0].values)
    assert torch.equal(before[1], after[1])


def test_rpl_5_a_sample_without_record_falls_back_live_and_is_counted():
    x, logits = activations(0, range(4)).repeat(2, 1), router_logits(0, range(4)).repeat(2, 1)
    batch = ReplayBatch(positions=torch.arange(4).repeat(2, 1), records=[recorded(length=4), None])
    with replay(batch):
        rounded, ids = round_at(X0, x), route_site(0, logits, top_k=TOP_K)
    assert torch.equal(rounded.values[4:], round_at(X0, x[4:]).values)
    assert torch.equal(ids[4:], route_site(0, logits[4:], top_k=TOP_K))
    assert batch.counters.sites[X0].positions_missing == 4
    assert int(batch.counters.routing[0].positions_replayed) == 4


def test_codes_are_made_when_anything_reads_them():
    x, record = activations(0, range(4)), recorded(length=4)

    def codes(**more):
        return round_site(x, site=X0, scheme=NVFP4_ROW_POW2, with_codes=False, **more).codes

    assert codes() is None
    positions = torch.arange(4)[None]
    with replay(ReplayBatch(positions=positions, records=[record])):
        assert codes() is None
    with replay(ReplayBatch(positions=positions, records=[None], references=[record])):
        assert codes() is not None
    log = StepLog(sites=[X0])
    log.begin_step(num_tokens=4)
    with record_to(log):
        assert codes() is not None


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16), (300, torch.int16)]
)
def test_dty_3_large_expert_ids_survive_and_absent_rows_are_no_id(num_experts, dtype):
    # 299 as uint8 would be 43, and a sentinel of -1 would be the id 255. Here absence is a flag beside the ids.
    last = num_experts - 1
    chosen = torch.tensor([[last, 0], [255, 1], [2, last]])
    logits = torch.zeros(3, num_experts).scatter_(1, chosen, torch.tensor([2.0, 1.0]).expand(3, 2))
    log = StepLog(sites=(), routed_layers=(0,), num_experts=num_experts)
    log.begin_step(num_tokens=3)
    with record_to(log):
        assert torch.equal(route_site(0, logits, top_k=2), chosen)
    log.end_step()
    valid = torch.tensor([True, True, False])
    (made,) = log.build([SequenceRows(identity=identity(), rows=range(3), valid=valid)])
    loaded = record_from_bytes(record_to_bytes(made))
    assert loaded.routed[:, 0].tolist() == chosen.tolist()
    assert loaded.routed.dtype == dtype and loaded.num_bytes().routed == 6 * expert_id_bytes(num_experts)
    other = logits.flip(1)  # today's router would choose other experts everywhere
    with replay(ReplayBatch(positions=torch.arange(3)[None], records=[loaded])):
        ids = route_site(0, other, top_k=2)
    assert torch.equal(ids[:2], chosen[:2])
    assert torch.equal(ids[2], route_site(0, other[2:], top_k=2)[0])
    wrong = replace(loaded, routed=torch.tensor([[[last + 1, 0]], [[255, 1]], [[0, 1]]], dtype=torch.int16))
    with (
        replay(ReplayBatch(positions=torch.arange(3)[None], records=[wrong])),
        pytest.raises(RecordError, match=rf"0\.\.{last}"),
    ):
        route_site(0, other, top_k=2)


def test_dty_3_more_experts_than_an_id_can_name_are_refused():
    StepLog(sites=(), routed_layers=(0,), num_experts=1 << 15)
    with pytest.raises(ConfigError, match="32769 experts.*up to 32768"):
        StepLog(sites=(), routed_layers=(0,), num_experts=(1 << 15) + 1)


def test_dty_3_ids_that_a_byte_cannot_hold_are_refused_before_they_wrap():
    # 256 of 256 experts would be the id 0, which nothing later could tell from a choice. Mutation: no look at the step.
    log = StepLog(sites=(), routed_layers=(0, 3), num_experts=256)
    log.begin_step(num_tokens=1)
    log.observe_routing(0, torch.tensor([[255, 1]]))
    log.observe_routing(3, torch.tensor([[256, 1]]))
    with pytest.raises(RecordError, match=r"layers \[3\].*outside 0\.\.255 in a log for 256 experts"):
        log.end_step()
    log.abandon_step()
    log.begin_step(num_tokens=1)
    log.observe_routing(0, torch.tensor([[255, 1]]))
    log.observe_routing(3, torch.tensor([[2, 1]]))
    log.end_step()
    (made,) = log.build([SequenceRows(identity=identity(), rows=range(1))])
    assert made.routed.tolist() == [[[255, 1], [2, 1]]]


def test_records_of_both_widths_are_followed_in_one_batch():
    # Ids of two bytes are what earlier versions wrote for any number of experts.
    wide = routed_record([[4, 2], [1, 0]])
    narrow = replace(wide, routed=wide.routed.to(torch.uint8))
    assert not records_equal(narrow, wide)
    loaded = record_from_bytes(record_to_bytes(wide))
    assert loaded.routed.dtype == torch.int16
    batch = ReplayBatch(positions=torch.arange(2).expand(2, 2), records=[narrow, loaded])
    with replay(batch):
        ids = route_site(0, torch.zeros(4, NUM_EXPERTS), top_k=2)
    assert ids.tolist() == 2 * [[4, 2], [1, 0]]


def test_ovf_1_und_1_replay_counts_what_a_rounding_could_not_represent():
    # Mutations: padding counted; counters that only a reference fills.
    x = torch.zeros(4, 32)
    x[:, 0], x[:, 16] = 6000.0, 2.0**-12  # above 2688, and a block that rounds to scale 0
    batch = ReplayBatch(positions=torch.tensor([[0, 1, 2, -1]]), records=[None])
    with replay(batch):
        round_site(x, site=X0, scheme=NVFP4_STATIC_POW2, exponent=0)
    counts = batch.counters.sites[X0].resolved()
    assert (counts.blocks, counts.blocks_clamped, counts.blocks_floored, counts.values_clipped) == (
        6,
        3,
        3,
        3,
    )


def test_ovf_1_values_beyond_recorded_scales_are_counted_where_a_reference_measures():
    x, made = activations(0, range(4)), recorded(length=4)
    positions = torch.arange(4)[None]
    for references, factor, expected in ((None, 8, None), ([made], 8, True), ([made], 1, False)):
        batch = ReplayBatch(positions=positions, records=[made], references=references)
        with replay(batch):
            round_at(X0, x * factor)
        found = batch.counters.sites[X0].resolved().values_clipped
        assert (found is None) if expected is None else (found > 4) == expected
