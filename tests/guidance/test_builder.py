import pytest
import torch
from tests.guidance.sample_records import (
    K0,
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

from tracefp4.coding import CODECS, codec_by_name
from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.guidance import SequenceRows, StepLog, records_equal, round_site, route_site
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


def new_log(codecs=None):
    return StepLog(sites=[X0, K0], codecs=codecs, routed_layers=[0], num_experts=8)


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


@pytest.mark.parametrize("name", CODECS)
def test_a_log_that_encodes_builds_what_recoding_a_whole_record_gives(name):
    # Mutation: a codec that reads across rows, or a log that keeps whole codes.
    codecs = {X0: name, K0: "mantissa+coset1"}
    whole, lean = new_log(), new_log(codecs)
    rows = {0: [], 1: []}
    for tokens in ([(0, 0), (1, 0), (0, 1)], [(1, 1), (0, 2)], [(0, 3)]):
        first = step(whole, tokens)
        assert step(lean, tokens) == first
        for place, (trajectory, _) in enumerate(tokens):
            rows[trajectory].append(first + place)
    sequences = [SequenceRows(identity=identity(t), rows=rows[t], cache_rows=rows[t][::-1]) for t in rows]
    for expected, found in zip(whole.build(sequences), lean.build(sequences), strict=True):
        assert records_equal(found, expected.recode(codecs))


def test_res_1_a_log_holds_the_bytes_of_its_records_and_not_one_byte_a_value():
    # Mutation: codes kept unpacked until a record is built (1 + 1/16 bytes a value).
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
    per_value = {}
    for name in ("full", "mantissa", "secded", "bch256_3+bch128_2"):
        log = StepLog(sites=[X0], codecs={X0: name})
        log.begin_step(num_tokens=64)
        with record(log):
            round_site(x, site=X0, scheme=NVFP4_ROW_POW2)
        log.end_step()
        row = codec_by_name(name).row_bytes(2048, block_size=16) + 1
        assert log.num_bytes == 64 * row
        assert sum(a.untyped_storage().nbytes() for a in log._steps[X0].payload) <= log.num_bytes
        per_value[name] = log.num_bytes / x.numel()
    assert per_value["full"] == 0.5 + 1 / 16 + 1 / 2048
    assert per_value["bch256_3+bch128_2"] < 0.0145


def test_codecs_of_sites_that_are_not_recorded_are_refused():
    with pytest.raises(ConfigError, match=r"got \['layers\.1\.x'\]\. Its sites are \['layers\.0\.x'\]"):
        StepLog(sites=[X0], codecs={X0: "secded", X1: "secded"})
    with pytest.raises(ConfigError, match="got 'auto'"):
        StepLog(sites=[X0], codecs={X0: "auto"})


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


@pytest.mark.parametrize("per_token", [(2, 1), (1, 2)])
def test_aln_6_a_site_whose_rows_per_token_change_between_steps_is_refused(per_token):
    # Mutation: the last step's rows per token are taken for all: rows of earlier steps then go to other tokens.
    log = StepLog(sites=[W0])
    for step, rows in enumerate(per_token):
        log.begin_step(num_tokens=4)
        with record(log):
            if step:
                with pytest.raises(RecordError, match="changed its layout between two steps"):
                    round_at(W0, activations(0, range(4), site=W0, rows=rows))
                log.abandon_step()
            else:
                round_at(W0, activations(0, range(4), site=W0, rows=rows))
                log.end_step()
    assert log.num_rows == 4


def test_a_step_without_tokens_and_an_abandoned_first_step_say_nothing_of_the_layout():
    log, rows = StepLog(sites=[W0]), []
    for num_tokens, per_token, is_kept in (
        (3, 1, False),
        (0, TOP_K, True),
        (2, TOP_K, True),
        (0, TOP_K, True),
    ):
        first = log.begin_step(num_tokens=num_tokens)
        with record(log):
            round_at(W0, activations(0, range(num_tokens), site=W0, rows=per_token))
        if is_kept:
            log.end_step()
            rows += range(first, first + num_tokens)
        else:
            log.abandon_step()
    built = log.build([SequenceRows(identity=identity(), rows=rows)])[0]
    assert records_equal(built, recorded(length=2, sites=[W0], routed_layers=()))
