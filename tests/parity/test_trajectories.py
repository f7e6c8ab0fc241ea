"""Completions of every kind that an engine gives, replayed by the trainer: no decision differs, and a record that is
off by one position shows at once."""

import pytest
from tests.parity.chains import shifted

from tracefp4.rl.batching import token_logprobs
from tracefp4.rl.samples import TrainingSample
from tracefp4.rollout import SamplingParams

# float32 log-softmax of the trainer against the float64 one of the engine's sampler
LOGPROB = 2e-6
PROMPTS = [[7, 3, 9, 1, 4, 4, 2, 8, 5], [7, 3, 9, 1, 4, 4, 2, 6], [2, 2]]


def params(max_tokens, **changes):
    return SamplingParams(max_tokens=max_tokens, **({"seed": 3} | changes))


def turns(engine):
    """Two turns with an environment in between."""
    first = [row[0] for row in engine.generate(PROMPTS, params(5))]
    return engine.extend(first, [[1, 2, 3], [], [7]], params(4))


def prefix_hits(engine):
    """The second of two calls, which finds pages of the first; in chunks."""
    engine.generate(PROMPTS, params(5))
    return [row[0] for row in engine.generate([[*PROMPTS[0], 1, 2, 3], PROMPTS[1]], params(6))]


def parts(engine):
    """A rollout that was handed over twice."""
    for index, prompt in enumerate(PROMPTS):
        engine.submit(prompt, params(9), prompt_index=index)
    found = []
    for _ in range(2):
        for _ in range(4):
            engine.step()
        found = engine.suspend()
        for c in found:
            engine.resubmit(c, [], params(9 - len(c.token_ids)))
    while engine.has_work:
        engine.step()
    return engine.take_finished()


def lost_pages(engine):
    """Samples that give way to each other, with no host memory for their pages."""
    return [c for row in engine.generate(PROMPTS, params(12, n=2)) for c in row]


def stop_texts(engine):
    """Tokens removed after a stop text."""
    return [row[0] for row in engine.generate(PROMPTS, params(12, stop=("!", "#", "$%", "C", "B")))]


KINDS = {
    turns: {},
    prefix_hits: {"prefix_cache": True, "max_tokens_per_step": 5, "max_batch": 5},
    parts: {"prefix_cache": True},
    lost_pages: {"num_pages": 8, "max_swapped_pages": 0},
    stop_texts: {"decode": lambda ids: "".join(chr(33 + i) for i in ids)},
}


def sample_of(c):
    return TrainingSample(
        trajectory=c.record.identity.trajectory,
        prompt_ids=tuple(c.prompt_ids),
        token_ids=tuple(c.token_ids),
        rollout_logprobs=tuple(c.logprobs),
        weight_versions=tuple(c.weight_versions),
        trained_mask=None if c.sampled_mask is None else tuple(c.sampled_mask),
        record=c.record,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_replay_changes_no_decision_and_gives_the_rollout_s_log_probs(chain, kind):
    # Mutations: the record of the last turn alone; rows of a restored page one position off.
    engine = chain.engine(**KINDS[kind])
    completions = [c for c in kind(engine) if c.token_ids]
    stats = engine.stats
    assert {
        turns: stats.positions_restored,
        prefix_hits: stats.prefix_hits,
        parts: stats.positions_restored,
        lost_pages: stats.pages_lost,
        stop_texts: sum(c.finish_reason == "stop" for c in completions),
    }[kind] > 0, "the run did what it is named after"
    samples = [sample_of(c) for c in completions]
    batch = chain.batch(samples)
    logits, counters = chain.replayed(batch, batch.records)
    assert int(counters.total().values_changed) == 0
    found = token_logprobs(logits, input_ids=batch.input_ids, mask=batch.completion_mask)
    sampled = batch.loss_mask
    assert int(sampled.sum()) == sum(sum(c.sampled_flags) for c in completions)
    assert float((found - batch.rollout_logprobs)[sampled].abs().max()) <= LOGPROB
    wrong = [shifted(sample.record) for sample in samples]
    assert int(chain.replayed(batch, wrong)[1].total().values_changed) > 0
