import pytest
import torch
from tests.guidance.sample_records import (
    K0,
    TOP_K,
    X0,
    X1,
    activations,
    identity,
    recorded,
    round_at,
    router_logits,
)

from tracefp4.errors import RecordError
from tracefp4.guidance import SequenceRows, StepLog, records_equal, route_site
from tracefp4.guidance.session import record


def step(log, tokens, *, sites=(X0, K0), routes=True):
    """One engine step over (trajectory, position) tokens; returns the flat row of the first."""
    first = log.begin_step(num_tokens=len(tokens))
    with record(log):
        for site in sites:
            parts = [activations(trajectory, [position], site=site) for trajectory, position in tokens]
            round_at(site, torch.cat(parts))
        if routes:
            route_site(
                0,
                torch.cat([router_logits(trajectory, [position]) for trajectory, position in tokens]),
                top_k=TOP_K,
            )
    log.end_step()
    return first


def new_log():
    return StepLog(sites=[X0, K0], routed_layers=[0], num_experts=8)


def alone(trajectory, length, **more):
    return recorded(trajectory, length=length, sites=(X0, K0), routed_layers=(0,), **more)


def test_sequences_of_mixed_steps_equal_sequences_run_alone():
    log, rows = new_log(), {0: [], 1: [], 2: []}
    steps = [
        [(0, 0), (0, 1), (0, 2), (1, 0)],  # prefill
        [(1, 1), (0, 3)],  # decode in another order
        [(2, 0), (2, 1), (0, 4), (1, 2)],  # a late prefill beside decodes
        [(2, 2), (1, 3)],
    ]
    for tokens in steps:
        first = step(log, tokens)
        for place, (trajectory, _) in enumerate(tokens):
            rows[trajectory].append(first + place)
    assert log.num_rows == 12
    built = log.build([SequenceRows(identity=identity(t), rows=rows[t]) for t in (2, 0, 1)])
    for trajectory, found in zip((2, 0, 1), built, strict=True):
        assert records_equal(found, alone(trajectory, len(rows[trajectory])))


def test_lif_1_a_shared_prompt_gives_every_sequence_the_original_rows():
    log = new_log()
    prompt = [step(log, [(0, 0), (0, 1)]) + place for place in range(2)]
    first = step(log, [(0, 2), (0, 2)])
    built = log.build(
        [SequenceRows(identity=identity(0), rows=[*prompt, first + place]) for place in range(2)]
    )
    for found in built:
        assert records_equal(found, alone(0, 3))


def test_lif_4_a_site_that_records_nothing_raises_at_the_first_step():
    log = StepLog(sites=[X0, X1], routed_layers=[0, 1], num_experts=8)
    log.begin_step(num_tokens=1)
    with record(log):
        round_at(X0, activations(0, [0]))
        route_site(0, router_logits(0, [0]), top_k=TOP_K)
    with pytest.raises(
        RecordError, match=r"\{'layers\.1\.x': 0, 'layers\.1\.routing': 0\}.*recorded nothing"
    ):
        log.end_step()


def test_lif_4_a_site_observed_twice_raises():
    log = StepLog(sites=[X0])
    log.begin_step(num_tokens=1)
    with record(log):
        round_at(X0, activations(0, [0]))
        round_at(X0, activations(0, [0]))
    with pytest.raises(RecordError, match=r"'layers\.0\.x': 2"):
        log.end_step()


def test_lif_4_all_zero_routing_rows_are_refused():
    log = StepLog(sites=[], routed_layers=[0], num_experts=8)
    log.begin_step(num_tokens=2)
    log.observe_routing(0, torch.zeros(2, 2, dtype=torch.int64))
    log.end_step()
    with pytest.raises(RecordError, match=r"impossible expert ids at position 0, layer 0; got \[0, 0\]"):
        log.build([SequenceRows(identity=identity(), rows=[0, 1])])


def test_lif_5_rows_of_rejected_drafts_are_left_out():
    log = new_log()
    first = step(log, [(0, 0), (0, 1), (9, 2), (9, 3)])  # 1 confirmed, 1 draft accepted, 2 rejected
    rows = [first, first + 1]
    rows.append(step(log, [(0, 2)]))  # the bonus token
    assert records_equal(log.build([SequenceRows(identity=identity(), rows=rows)])[0], alone(0, 3))


def test_cached_keys_keep_the_pass_that_cached_them():
    log = new_log()
    step(log, [(0, 0)])
    step(log, [(5, 0)])  # a recomputation that came out otherwise
    found = log.build([SequenceRows(identity=identity(), rows=[1], cache_rows=[0])])[0]
    assert torch.equal(found.sites[X0].payload, alone(5, 1).sites[X0].payload)
    assert torch.equal(found.sites[K0].payload, alone(0, 1).sites[K0].payload)


def test_rows_outside_the_log_and_odd_batches_are_refused():
    log = new_log()
    step(log, [(0, 0), (0, 1)])
    with pytest.raises(RecordError, match=r"got 0 to 2.*0\.\.1"):
        log.build([SequenceRows(identity=identity(), rows=[0, 2])])
    log.begin_step(num_tokens=2)
    with record(log), pytest.raises(RecordError, match="rounded 3 rows in a step of 2 tokens"):
        round_at(X0, activations(0, range(3)))


def test_empty_sequences_and_no_sequences():
    log = new_log()
    step(log, [(0, 0)])
    assert log.build([]) == []
    empty = log.build([SequenceRows(identity=identity(), rows=[], start=4)])[0]
    assert (empty.length, empty.start, empty.sites[X0].payload.shape[0]) == (0, 4, 0)


def test_partial_validity_travels_with_the_record():
    log = new_log()
    step(log, [(0, 0), (0, 1)])
    valid = torch.tensor([True, False])
    found = log.build([SequenceRows(identity=identity(), rows=[0, 1], valid=valid)])[0]
    assert found.valid.tolist() == [True, False]
