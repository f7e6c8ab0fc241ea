"""Every codec over a whole model: nothing changes where the two sides agree, and less differs where they do not."""

import pytest
from tests.assertions import assert_bitwise
from tests.parity.chains import make_chain, mismatch

from tracefp4.coding import CODECS
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.guidance import (
    NoiseGate,
    choose_codecs,
    histograms,
    record_from_bytes,
    record_to_bytes,
    residual_counts,
)
from tracefp4.guidance.rates import codec_row_bytes
from tracefp4.patching import PlanRules
from tracefp4.patching.budget import decisions_for, record_bytes
from tracefp4.patching.catalogue import shape_from_config

TRIED = ("full", "mantissa", "mantissa_lean", "secded", "bch64_3+coset1", "parity2", "parity16")


@pytest.fixture(scope="module")
def noisy():
    """Both sides in emulated bf16, so that they differ as two orders of summation do; codecs are to be chosen."""
    found = make_chain(arithmetic=EMULATED, num_hidden_layers=4, rules=PlanRules(guidance="auto"))
    return found, found.batch(found.rollouts(num_prompts=8, max_tokens=40))


@pytest.fixture(scope="module")
def measured(noisy):
    """Counters of a pass that followed whole codes and tried other codecs."""
    chain, batch = noisy
    return chain.replayed(batch, batch.records, references=batch.records, candidates=TRIED)[1]


@pytest.mark.parametrize("codec", CODECS)
def test_any_codec_is_a_no_op_where_the_two_sides_agree(chain, rollouts, codec):
    # Mutations: syndromes of other rows; coset scales decoded under another exponent than the recorded one.
    batch = chain.batch(rollouts)
    unguided, _ = chain.replayed(batch, batch.records, sites=())
    records = [record_from_bytes(record_to_bytes(record.recode(codec))) for record in batch.records]
    logits, counters = chain.replayed(batch, records, references=batch.records)
    real = batch.attention_mask
    assert_bitwise(logits[real], unguided[real])
    total = counters.total()
    assert (total.values_changed, total.mismatched_after, total.blocks_undecoded) == (0, 0, 0)
    assert total.positions_guided == 6 * sum(record.length for record in batch.records)


@pytest.mark.parametrize("codec", CODECS)
def test_records_weigh_what_the_budget_says(chain, rollouts, codec):
    # Mutation: a budget of its own arithmetic. A row of 64 values is shorter than a block of bch128_3 and is padded.
    shape = shape_from_config(chain.model.config.to_dict(), name="tiny")
    rules = PlanRules(guidance=codec)
    budget = record_bytes(shape, decisions_for(shape, rules), rules)
    for sample in rollouts:
        record = sample.record.recode(codec)
        held = record.num_bytes(kinds=("x", "w2")), record.num_bytes(kinds=("k", "v"))
        assert [part.codec for part in held] == [record.length * n for n in (budget.activations, budget.kv)]
        assert held[0].exponents + held[1].exponents == record.length * budget.row_exponents
        found = record.num_bytes()
        assert found.routed == record.length * budget.routed_ids > 0
        assert found.total == record.length * budget.total


@pytest.mark.parametrize("codec", [name for name in CODECS if name not in ("parity4", "parity8", "parity16")])
def test_guidance_lowers_the_mismatch(noisy, codec):
    # One parity bit for 4 values and more follows too little for this model of 1% local mismatch.
    chain, batch = noisy
    unguided, _ = chain.replayed(batch, batch.records, sites=())
    records = [record.recode(codec) for record in batch.records]
    guided, counters = chain.replayed(batch, records, references=batch.records)
    before, after = mismatch(batch, unguided), mismatch(batch, guided)
    assert 0 < after < 0.25 * before, (after, before)
    total = counters.total()
    assert total.mismatched_after < 0.5 * total.mismatched_before


def test_a_calibrated_gate_follows_a_fraction_of_the_values_and_costs_little(noisy, measured):
    chain, batch = noisy
    unguided, _ = chain.replayed(batch, batch.records, sites=())
    open_logits, open_counters = chain.replayed(batch, batch.records, references=batch.records)
    gate = NoiseGate.calibrated(histograms(measured))
    assert set(gate.bands) == set(chain.plan.guided_sites)
    gated_logits, counters = chain.replayed(batch, batch.records, references=batch.records, bands=gate.bands)
    total = counters.total()
    assert total.values_in_band < 0.3 * open_counters.total().values_in_band
    assert total.mismatched_after < 0.2 * total.mismatched_before
    lost = mismatch(batch, gated_logits) - mismatch(batch, open_logits)
    assert lost < 0.02 * mismatch(batch, unguided)


def test_what_weaker_codecs_leave_wrong_is_measured_beside_the_codes_that_are_followed(noisy, measured):
    shares = residual_counts(measured).shares()
    assert set(shares) == set(noisy[0].plan.guided_sites)
    for found in shares.values():
        assert found["full"] == found["mantissa"] == 0.0
        assert found["secded"] <= found["parity16"] < 0.03
    assert sum(found["parity16"] > 0.001 for found in shares.values()) > 6


def test_codecs_chosen_from_a_measurement_make_a_plan_that_is_followed(noisy, measured):
    # The way of guidance = "auto": measure, choose by site, put the choice into the plan, recode by the plan.
    chain, batch = noisy
    assert chain.plan.needs_calibration
    shares = residual_counts(measured).shares()
    prices = codec_row_bytes(batch.records[0].sites, codecs=TRIED)
    allowed = {"x": 0.0005, "k": 0.01, "v": 0.01}
    plan = chain.plan.with_codecs(choose_codecs(shares, row_bytes=prices, allowed=allowed))
    assert not plan.needs_calibration
    assert all(shares[site][name] <= allowed[site.kind] for site, name in plan.codecs.items())
    assert len(set(plan.codecs.values())) > 1
    records = [record.recode(plan.codecs) for record in batch.records]
    held = sum(record.num_bytes().codec for record in records)
    per_token = sum(prices[site][name] for site, name in plan.codecs.items())
    assert held == per_token * sum(record.length for record in records)
    _, counters = chain.replayed(batch, records, references=batch.records)
    total = counters.total()
    assert total.mismatched_after < total.mismatched_before
    # Not less than was predicted: what one site leaves wrong is noise for the next.
    predicted = sum(residual_counts(measured).wrong[site][name] for site, name in plan.codecs.items())
    assert total.mismatched_after >= predicted > 0
