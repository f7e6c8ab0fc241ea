"""What every engine must do. A new engine adds one builder to ENGINES; the tests know only the Engine
protocol."""

import math

import pytest
import torch
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled

from tracefp4.errors import ConfigError
from tracefp4.rollout import SamplingParams

ENGINES = {"local": lambda **changes: make_engine(control=True, **changes)}


@pytest.fixture(params=sorted(ENGINES))
def build(request):
    return ENGINES[request.param]


@pytest.fixture
def engine(build):
    return build()


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(engine):
    prompts = make_prompts(3)
    first = outputs(engine.generate(prompts, sampled(8, n=2, seed=1)))
    assert outputs(engine.generate(prompts, sampled(8, n=2, seed=1))) == first
    assert outputs(engine.generate(prompts, sampled(8, n=2, seed=2))) != first


@pytest.mark.parametrize("max_batch", [1, 3, 33])
def test_a_seed_gives_the_same_tokens_in_any_batch(build, max_batch):
    prompts, params = make_prompts(5), sampled(6, n=2, seed=1)
    expected = outputs(build().generate(prompts, params))
    assert outputs(build(max_batch=max_batch).generate(prompts, params)) == expected
    assert outputs(build().generate(prompts[:1], params)) == expected[:1]


def test_kvq_3_chunks_of_any_size_give_the_same_codes_and_log_probs(build):
    """Attention reads stored K and V also inside a chunk, so chunking shows nowhere, and neither do cached prefixes."""
    prompt, params = [5, 1, 3, 2, 6, 8, 4, 9], sampled(4, temperature=0.0)
    ((expected,),) = build(max_tokens_per_step=8).generate([prompt], params)
    for size in (4, 3, 1):
        ((c,),) = build(max_tokens_per_step=size, max_batch=1).generate([prompt], params)
        assert (c.token_ids, c.logprobs) == (expected.token_ids, expected.logprobs)
        for site, part in expected.record.sites.items():
            assert torch.equal(c.record.sites[site].payload, part.payload)
            assert torch.equal(c.record.sites[site].block_scales, part.block_scales)
        assert torch.equal(c.record.routed, expected.record.routed)


def test_n_samples_come_in_order_and_differ(engine):
    prompts = make_prompts(2)
    found = engine.generate(prompts, sampled(8, n=4))
    for index, row in enumerate(found):
        assert [(c.prompt_index, c.sample_index) for c in row] == [(index, i) for i in range(4)]
        assert all(c.prompt_ids == prompts[index] for c in row)
        assert len({tuple(c.token_ids) for c in row}) > 1


def test_the_first_sample_is_the_same_alone(engine):
    prompts = make_prompts(2)
    alone = engine.generate(prompts, sampled(6))
    group = engine.generate(prompts, sampled(6, n=3))
    assert [row[0].token_ids for row in group] == [row[0].token_ids for row in alone]


def test_any_stop_token_ends_a_completion_and_is_its_last_token(engine):
    prompts = make_prompts(6)
    free = engine.generate(prompts, sampled(12, seed=3))
    stops = (free[0][0].token_ids[2], free[1][0].token_ids[5])
    for completion, row in zip(
        free, engine.generate(prompts, sampled(12, seed=3, stop_token_ids=stops)), strict=True
    ):
        tokens = completion[0].token_ids
        cut = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        assert row[0].token_ids == tokens[:cut]
        assert row[0].finish_reason == ("stop" if tokens[cut - 1] in stops else "length")


def test_a_stop_token_at_the_limit_is_a_stop(engine):
    (row,) = engine.generate([[1, 2]], sampled(3))
    (again,) = engine.generate([[1, 2]], sampled(3, stop_token_ids=(row[0].token_ids[2],)))
    assert again[0].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_lengths_and_rows(engine, max_tokens):
    for row in engine.generate(make_prompts(3, shortest=1), sampled(max_tokens, n=2)):
        for c in row:
            assert len(c.token_ids) == len(c.logprobs) == len(c.weight_versions) == max_tokens
            assert c.finish_reason == "length"
            assert c.record.start == 0 and c.record.length == len(c.prompt_ids) + max_tokens - 1
            assert c.record.valid.all()


def test_aln_6_end_token_length_and_abort_carry_a_record(build):
    """Rows for all inputs of the kept tokens; for abort those that were computed.

    Asynchronous scheduling, the other half of the case, is not offered: a step ends with its tokens known.
    """
    engine = build(decode=letters)
    (free,) = engine.generate([[1, 2, 3]], sampled(6, seed=1))
    stop = free[0].token_ids[3]
    (by_token,) = engine.generate([[1, 2, 3]], sampled(6, seed=1, stop_token_ids=(stop,)))
    (by_text,) = engine.generate([[1, 2, 3]], sampled(6, seed=1, stop=(letters([stop]),), keeps_stop=True))
    assert free[0].record.length == 3 + 6 - 1
    for row in (by_token, by_text):
        assert row[0].finish_reason == "stop" and row[0].record.length == 3 + len(row[0].token_ids) - 1
    if not hasattr(engine, "abort"):
        pytest.skip("this engine cannot abort")
    request = engine.submit([1, 2, 3], sampled(6, seed=1, n=2))
    for _ in range(3):
        engine.step()
    engine.abort(request)
    aborted = engine.take_finished()
    assert [c.finish_reason for c in aborted] == ["abort", "abort"]
    for c in aborted:
        assert c.record.length == 3 + len(c.token_ids) - 1
    assert aborted[0].token_ids == free[0].token_ids[: len(aborted[0].token_ids)]


def letters(token_ids):
    """A decoder for which every token is one character."""
    return "".join(chr(ord("A") + token) for token in token_ids)


def test_abort_in_the_middle_of_a_prompt_keeps_what_was_computed(build):
    engine = build(max_batch=4, max_tokens_per_step=4)
    request = engine.submit([1] * 11, sampled(5, n=2))
    engine.step()
    engine.step()
    engine.abort(request)
    assert [(c.token_ids, c.record.length) for c in engine.take_finished()] == [([], 8), ([], 8)]
    unstarted = engine.submit([1] * 11, sampled(5))
    engine.abort(unstarted)
    (completion,) = engine.take_finished()
    assert completion.record is None and completion.finish_reason == "abort"


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 9, "top_p": 0.9}],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, changes):
    prompts = make_prompts(2)
    found = engine.generate(prompts, sampled(6, n=2, **changes))
    params = sampled(1, **changes)
    for row in found:
        for c in row:
            for i, (token, logprob) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
                logits = next_logits(engine, c.prompt_ids + c.token_ids[:i])
                assert math.isclose(logprob, recomputed(logits, token, params), abs_tol=1e-9)


def next_logits(engine, ids):
    """Log-probs at temperature 1 of every possible next token, from greedy probes of a prefill."""
    probe = engine._runner.run
    kept = []

    def keep(works):
        result = probe(works)
        kept.append(result.outputs)
        return result

    engine._runner.run = keep
    engine.generate([ids], SamplingParams(max_tokens=1, temperature=0.0))
    del engine._runner.run
    return kept[0][0].double()


def recomputed(logits, token, params):
    probs = (logits / params.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    kept = order[: params.top_k] if params.top_k else order
    total, nucleus = sum(probs[i].item() for i in kept), []
    for i in kept:
        if nucleus and sum(probs[j].item() for j in nucleus) / total >= params.top_p:
            break
        nucleus.append(i)
    assert token in nucleus
    return math.log(probs[token].item() / sum(probs[i].item() for i in nucleus))


def test_greedy_is_the_most_probable_token_whatever_the_seed(engine):
    prompts = make_prompts(2)
    first = outputs(engine.generate(prompts, sampled(6, temperature=0.0, seed=1)))
    assert outputs(engine.generate(prompts, sampled(6, temperature=0.0, seed=2))) == first
    assert sampled(1, temperature=0.0).is_greedy


def test_new_weights_change_the_output_and_the_version(engine):
    prompts = make_prompts(2)
    before = engine.generate(prompts, sampled(6, temperature=0.0))
    engine.update_weights(tiny_model(seed=9).state_dict(), version=3)
    after = engine.generate(prompts, sampled(6, temperature=0.0))
    assert engine.weight_version == 3 and outputs(after) != outputs(before)
    assert {v for row in before for c in row for v in c.weight_versions} == {0}
    assert {v for row in after for c in row for v in c.weight_versions} == {3}
    assert after[0][0].record.versions().unique().tolist() == [3]


def test_new_weights_equal_a_new_engine_with_them(build):
    model, prompts = tiny_model(seed=9), make_prompts(3)
    engine = build()
    engine.update_weights(model.state_dict(), version=1)
    found = engine.generate(prompts, sampled(6))
    assert outputs(found) == outputs(build(model=model).generate(prompts, sampled(6)))


def test_running_requests_go_on_under_new_weights(engine):
    if not hasattr(engine, "submit"):
        pytest.skip("this engine cannot be stepped")
    engine.submit([1, 2, 3], sampled(6))
    for _ in range(3):
        engine.step()
    engine.update_weights(tiny_model(seed=9).state_dict(), version=1)
    while engine.has_work:
        engine.step()
    (completion,) = engine.take_finished()
    assert completion.weight_versions == [0, 0, 0, 1, 1, 1]
    assert completion.record.versions().tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("version", [0, -1])
def test_versions_only_increase(engine, version):
    with pytest.raises(ConfigError, match=f"got version {version} after 0"):
        engine.update_weights(tiny_model(seed=9).state_dict(), version=version)


def test_unknown_and_missing_names_are_refused_and_change_nothing(engine):
    before = outputs(engine.generate([[1, 2]], sampled(4)))
    state = dict(tiny_model(seed=9).state_dict())
    state["model.layers.9.mlp"] = state.pop("lm_head.weight")
    with pytest.raises(
        ConfigError, match=r"missing \['lm_head.weight'\], unexpected \['model.layers.9.mlp'\]"
    ):
        engine.update_weights(state, version=1)
    assert engine.weight_version == 0 and outputs(engine.generate([[1, 2]], sampled(4))) == before


def test_peak_pages_stay_below_the_sum_of_maximum_lengths(engine):
    if not hasattr(engine, "submit"):
        pytest.skip("this engine cannot be stepped")
    prompts, params = make_prompts(10, longest=5), sampled(40, stop_token_ids=tuple(range(0, 40, 3)))
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, params, prompt_index=index)
        engine.step()
    while engine.has_work:
        engine.step()
    assert len(engine.take_finished()) == 10
    assert (
        0
        < engine.stats.peak_pages
        < sum(-(-(len(prompt) + 39) // engine.page_size) for prompt in prompts) // 2
    )


def test_stats_count(engine):
    prompts = make_prompts(3)
    engine.generate(prompts, sampled(5, n=2))
    stats = engine.stats
    assert stats.tokens_generated == 3 * 2 * 5 and stats.prefill_tokens == sum(map(len, prompts))
    assert stats.seconds > 0 and stats.num_steps >= 5 and stats.peak_pages > 0


def test_nothing_in_nothing_out(engine):
    assert engine.generate([], sampled(3)) == []


@pytest.mark.parametrize("prompt", [[], [40], [-1], [0, 1000]], ids=str)
def test_prompts_that_make_no_sense_are_refused(engine, prompt):
    with pytest.raises(ConfigError, match="at least one token"):
        engine.generate([[1], prompt], sampled(3))
    assert torch.is_tensor(engine.generate([[1]], sampled(2))[0][0].record.valid)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"n": 0}],
    ids=str,
)
def test_sampling_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**({"max_tokens": 4} | wrong))
