"""One function on both sides: trainer at any batch shape, engine at any chunking, record and replay.

The equalities hold bit for bit in the control arithmetic, where no summation order can show; in the emulated
one the two sides differ as real kernels do, and guidance must make them differ less.
"""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.parity.chains import make_chain, make_samples, mismatch, shifted

from tracefp4.formats.arithmetic import EMULATED
from tracefp4.guidance import ReplayBatch, Site
from tracefp4.guidance.session import replay
from tracefp4.patching import PlanRules

GUIDES = [("full", "bracket"), ("mantissa", "bracket"), ("mantissa", "nearest_cell")]
MODELS = [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [0], "tie_word_embeddings": True}]
# float32 log-softmax of the engine's sampler against float64 here
LOGPROB = 2e-6


def model_id(changes):
    return next(iter(changes), "default")


@pytest.fixture(scope="module")
def noisy():
    """Both sides in emulated bf16, and completions that differ between them by rounding noise."""
    found = make_chain(arithmetic=EMULATED, num_hidden_layers=4)
    return found, found.rollouts(num_prompts=8, max_tokens=40)


def assert_same_pass(found, expected):
    """Equal logits, codes, scale bytes and routing of one sample."""
    assert_bitwise(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for key, parts in expected[1].items():
        for part, wanted in zip(found[1][key], parts, strict=True):
            assert_bitwise(part.flatten(), wanted.flatten())


@pytest.mark.parametrize("size", [1, 3, 33])
def test_trainer_does_not_depend_on_the_batch(chain, size):
    # BAT-1. Mutation: an activation scale over the whole micro-batch.
    samples = make_samples([7] * 33)
    whole = chain.trainer_pass(chain.batch(samples))
    checked = range(0, 33, 8) if size == 1 else range(33)
    for begin in range(0, 33, size):
        chosen = [i for i in range(begin, begin + size) if i in checked]
        if chosen:
            parts = chain.trainer_pass(chain.batch(samples[begin : begin + size]))
            for i in chosen:
                assert_same_pass(parts[i - begin], whole[i])


@pytest.mark.parametrize(
    "padding", [{"side": "left", "left_extra": 3}, {"left_extra": 3}, {"side": "right"}, {"side": "left"}],
    ids=["left-and-3", "both", "right", "left"],
)  # fmt: skip
def test_pad_6_padding_changes_nothing(chain, padding):
    # Mutations: positions counted from the padding; a mask that lets padding in; padded rows in a scale.
    samples = make_samples([9, 4, 13])
    found = chain.trainer_pass(chain.batch(samples, **padding))
    for i, sample in enumerate(samples):
        (alone,) = chain.trainer_pass(chain.batch([sample]))
        assert_same_pass(found[i], alone)


@pytest.mark.parametrize(
    "padding", [{"side": "left", "left_extra": 3}, {"side": "right"}], ids=["left", "right"]
)
def test_guidance_finds_its_positions_under_padding(chain, rollouts, padding):
    # Mutation: guidance addressed by column instead of position.
    batch = chain.batch(rollouts, **padding)
    logits, counters = chain.replayed(batch, batch.records)
    assert int(counters.total().values_changed) == 0
    for site, counts in counters.sites.items():  # the last tokens have no decisions, w2 was not recorded
        missing = counts.positions if site.kind == "w2" else len(rollouts)
        assert counts.positions_missing == missing, site
    for row, sample in enumerate(rollouts):
        alone, _ = chain.replayed(chain.batch([sample]), [sample.record])
        assert_bitwise(logits[row][batch.attention_mask[row]], alone[0])


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_activation_checkpointing_changes_nothing(use_reentrant, backward):
    # Mutations: decisions that are consumed, counted twice, or not seen by the recomputation.
    chain = make_chain(rules=PlanRules(backward=backward))
    samples = chain.rollouts(max_tokens=6)
    batch = chain.batch(samples, side="left", left_extra=1)
    records = [shifted(sample.record).recode("mantissa") for sample in samples]  # decisions that matter

    def run():
        chain.model.zero_grad()
        replayed = ReplayBatch(positions=batch.positions, records=records)
        with replay(replayed):
            logits = chain.logits(batch)
            (logits[batch.attention_mask] ** 2).mean().backward()
        return logits.detach(), [p.grad.clone() for p in chain.model.parameters()], replayed.counters.total()

    chain.model.train()
    logits, gradients, counts = run()
    assert counts.values_changed > 0
    chain.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    again, recomputed, recounts = run()
    assert_bitwise(again, logits)
    assert recounts == counts
    for found, expected in zip(recomputed, gradients, strict=True):
        assert_bitwise(found, expected)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("changes", MODELS, ids=model_id)
def test_trainer_equals_engine_prefill(changes):
    # Mutations: another norm of the router's weights, K rounded before RoPE, w13 halves swapped, slots summed
    # in another order, a bf16 rounding that one side lacks.
    chain = make_chain(**changes)
    for sample in make_samples([9, 70]):  # 70: past the engine's split of 64 keys
        (found,) = chain.trainer_pass(chain.batch([sample]))
        logits, rows = chain.engine_pass(list(sample.input_ids), sample.num_tokens)
        assert_same_pass(found, (logits, rows))
        assert len(rows) == sum(4 * (p.activation is not None) // 2 + 2 for p in chain.plan.layers) + (
            chain.model.config.num_hidden_layers - len(chain.model.config.mlp_only_layers)
        )
        assert_bitwise(logits.bfloat16().to(logits.dtype), logits)


@pytest.mark.parametrize("chunks", [1, 4])
def test_kvq_3_engine_prefill_equals_decode(chain, chunks):
    # Mutation: attention that sees unrounded K and V inside a chunk.
    (sample,) = make_samples([21])
    tokens = list(sample.input_ids)
    assert_same_pass(chain.engine_pass(tokens, chunks), chain.engine_pass(tokens, 21))


def test_trainer_computes_the_rollouts_logprobs(chain, rollouts):
    # Mutation: log-probs of the neighbouring token, or weights that were not published.
    batch = chain.batch(rollouts)
    with torch.no_grad():
        assert mismatch(batch, chain.logits(batch)) < LOGPROB


@pytest.mark.parametrize(("codec", "decoder"), GUIDES, ids=lambda value: str(value))
@pytest.mark.parametrize("sites", ["default", "with-w2"])
def test_record_then_replay_is_a_no_op(chain, rollouts, codec, decoder, sites):
    # Mutations: a decoder that moves values that agree; rows of w2 in another order than the record's.
    if sites == "with-w2":
        every = tuple(Site(kind, layer) for kind in ("x", "w2", "k", "v") for layer in (0, 1))
        engine = chain.engine
        chain = type(chain)(chain.model, chain.plan, chain.arithmetic)
        chain.engine = lambda: engine(records=every)
        rollouts = chain.rollouts(max_tokens=5)
    batch = chain.batch(rollouts)
    with torch.no_grad():
        unguided = chain.logits(batch)
    records = [record.recode(codec) for record in batch.records]
    logits, counters = chain.replayed(batch, records, decoder=decoder, references=batch.records)
    real = batch.attention_mask
    assert_bitwise(logits[real], unguided[real])
    total = counters.total()
    assert len(counters.sites) == 8 and total.positions_guided > 0
    assert total.values_changed == 0 and total.mismatched_after == 0 and total.mismatched_before == 0
    assert total.blocks_mismatched == 0 and total.values_compared > 0
    for counts in counters.routing.values():
        assert int(counts.positions_replayed) > 0 and int(counts.positions_changed) == 0


@pytest.mark.parametrize(("codec", "decoder"), GUIDES, ids=lambda value: str(value))
def test_guidance_lowers_the_mismatch(noisy, codec, decoder):
    # Mutations: guidance that is dropped (equal mismatch), or applied to another site's values.
    chain, samples = noisy
    batch = chain.batch(samples)
    unguided, _ = chain.replayed(batch, batch.records, sites=())
    records = [record.recode(codec) for record in batch.records]
    guided, counters = chain.replayed(batch, records, decoder=decoder, references=batch.records)
    before, after = mismatch(batch, unguided), mismatch(batch, guided)
    assert 0 < after < 0.5 * before, (after, before)
    total = counters.total()
    assert total.values_changed > 0 and total.mismatched_after < total.mismatched_before


@pytest.mark.parametrize("kind", ["x", "k", "v"])
def test_every_kind_of_site_is_followed(noisy, kind):
    # Mutation: one of the sites forgets to ask the session.
    chain, samples = noisy
    batch = chain.batch(samples)
    sites = tuple(site for site in chain.plan.guided_sites if site.kind == kind)
    _, counters = chain.replayed(batch, batch.records, sites=sites, references=batch.records)
    for site, counts in counters.sites.items():
        expected = sum(sample.record.length for sample in samples) if site in sites else 0
        assert counts.positions_guided == expected, site
    last = counters.sites[Site(kind, 3)].resolved()
    assert last.mismatched_after < last.mismatched_before


@pytest.mark.parametrize("by", [-1, 1, 2])
def test_a_record_shifted_by_one_position_is_noticed(noisy, by):
    # Mutation: an off-by-one in the record's positions; red if it stays unnoticed.
    chain, samples = noisy
    batch = chain.batch(samples)
    records = [shifted(record, by) for record in batch.records]
    guided, _ = chain.replayed(batch, batch.records)
    unguided, _ = chain.replayed(batch, batch.records, sites=())
    moved, counters = chain.replayed(batch, records, references=batch.records)
    assert mismatch(batch, moved) > 20 * mismatch(batch, guided)
    assert mismatch(batch, moved) > 3 * mismatch(batch, unguided)
    first = counters.sites[Site("v", 0)].resolved()  # nothing guided comes before it
    assert first.mismatched_after > 0.2 * first.values_compared
    assert first.mismatched_before < 0.001 * first.values_compared


def test_deployment_needs_no_records(noisy):
    # Without a session the trainer rounds to nearest: the same as replay without records.
    chain, samples = noisy
    batch = chain.batch(samples)
    with torch.no_grad():
        plain = chain.logits(batch)
    none, counters = chain.replayed(batch, [None] * len(samples))
    real = batch.attention_mask
    assert_bitwise(plain[real], none[real])
    assert counters.total().positions_guided == 0
