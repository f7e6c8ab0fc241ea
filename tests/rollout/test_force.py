"""Teacher forcing: given tokens are decoded as if they had been drawn."""

import pytest
from tests.rollout.engines import make_engine, make_prompts, sampled

from tracefp4.errors import ConfigError
from tracefp4.guidance import records_equal


@pytest.fixture(scope="module")
def drawn():
    engine, prompts = make_engine(control=True), make_prompts(3)
    return engine, prompts, engine.generate(prompts, sampled(7, n=2, seed=5))


def test_forcing_an_engine_s_own_tokens_gives_its_log_probs_and_records(drawn):
    engine, prompts, groups = drawn
    forced = engine.force(prompts, [[c.token_ids for c in group] for group in groups])
    for group, other in zip(groups, forced, strict=True):
        for own, again in zip(group, other, strict=True):
            assert again.token_ids == own.token_ids
            assert again.logprobs == own.logprobs
            assert again.record.length == own.record.length
            sites = own.record.sites
            assert all((again.record.sites[s].payload == sites[s].payload).all() for s in sites)
    assert not records_equal(forced[0][0].record, forced[0][1].record)


def test_stop_tokens_inside_do_not_end_a_forced_completion_and_lengths_may_differ(drawn):
    engine, prompts, _ = drawn
    forced = engine.force(prompts[:1], [[[1, 2, 1, 3], [2]]])
    assert [c.token_ids for c in forced[0]] == [[1, 2, 1, 3], [2]]
    assert [len(c.logprobs) for c in forced[0]] == [4, 1]


@pytest.mark.parametrize("completions", [[[]], [[[]]], [[[10**6]]]])
def test_nothing_to_force_and_unknown_ids_are_refused(drawn, completions):
    engine, prompts, _ = drawn
    with pytest.raises(ConfigError):
        engine.force(prompts[:1], completions)


def test_a_temperature_of_zero_is_refused(drawn):
    engine, prompts, _ = drawn
    with pytest.raises(ConfigError, match="temperature"):
        engine.force(prompts[:1], [[[1]]], temperature=0.0)
