"""The automatic rate: what is chosen was verified, falls back to richer codecs, and belongs to the run's plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.rl.tiny_runs import PROMPTS, make_config, metrics_of

from tracefp4.coding import codec_by_name
from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.guidance import Site
from tracefp4.patching import PlanRules
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.planning import calibrated_plan, remembered_plan
from tracefp4.rl.policy import load_policy
from tracefp4.rl.rates import CANDIDATES, MARGIN, MAX_TRIES, RateChoice, Try, choose_rates
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.same_tokens import SameTokens, mismatch_row, routing_only, signed
from tracefp4.rollout import SamplingParams

AUTO = PlanRules(guidance="auto")
# Every site takes the codec that keeps everything, or the cheapest one.
RICH, POOR = "full", "parity16"
PLAIN = "tests.rl.tiny_runs:share_plain"
FEW = ("full", "mantissa", "secded", "parity4", "parity16")


@pytest.fixture(scope="module")
def calibration(tiny):
    """(bed, undecided plan, samples): one FP4 rollout with whole records."""
    policy = load_policy(tiny[0])
    config = make_config(*tiny, "unused")
    bed = SameTokens(policy=policy, arithmetic=EMULATED, rollout=config.rollout, micro_batch_tokens=512)
    prompts = [policy.tokenizer(text)["input_ids"] for text in PROMPTS]
    plan = calibrated_plan(policy, AUTO, prompts=prompts, arithmetic=EMULATED)
    samples = bed.sample(plan, prompts, SamplingParams(max_tokens=24, n=2, seed=5))
    return bed, plan, samples


def chosen(calibration, floor, candidates=FEW):
    bed, plan, samples = calibration
    return choose_rates(bed, plan, samples, floor=floor, candidates=candidates)


def price(codecs):
    widths = {"x": 32, "k": 16, "v": 16}
    return sum(
        codec_by_name(name).row_bytes(widths[site.kind], block_size=16) for site, name in codecs.items()
    )


def test_a_floor_that_everything_meets_takes_the_cheapest_codecs(calibration):
    choice = chosen(calibration, floor=100.0)
    assert choice.holds and choice.chosen.bytes_per_token == price(choice.codecs)
    cheapest = {site: min(price({site: name}) for name in FEW) for site in calibration[1].guided_sites}
    assert {site: price({site: name}) for site, name in choice.codecs.items()} == cheapest
    assert len(choice.tries) <= MAX_TRIES


def test_a_floor_that_nothing_meets_falls_back_to_codecs_that_leave_nothing_wrong(calibration):
    # Mutation: returning the last try instead of the best one that holds.
    bed, plan, samples = calibration
    told: list[str] = []
    choice = choose_rates(bed, plan, samples, floor=0.0, candidates=FEW, on_event=told.append)
    assert not choice.holds and len(choice.tries) == 1
    assert "no choice keeps mean |d log p|" in told[-1]
    decided = plan.with_codecs(choice.codecs)
    scored = bed.score(decided, signed(samples, decided), measure=True)
    assert sum(counts.mismatched_after for counts in scored.agreement.values()) == 0


def test_what_is_chosen_was_scored_end_to_end_and_holds(calibration):
    # Mutation: a choice that was never scored.
    bed, plan, samples = calibration
    loose, tight = (t.mean for t in (chosen(calibration, 100.0).chosen, chosen(calibration, 0.0).chosen))
    assert tight < loose
    floor = (tight + 0.3 * (loose - tight)) / MARGIN
    choice = chosen(calibration, floor)
    decided = plan.with_codecs(choice.codecs)
    mean = mismatch_row(samples, bed.score(decided, signed(samples, decided)).logprobs)["mean"]
    assert choice.holds and mean == choice.chosen.mean <= MARGIN * floor
    failed = [t for t in choice.tries if t.mean > MARGIN * floor]
    assert all(t.bytes_per_token < choice.chosen.bytes_per_token for t in failed)
    summary = choice.summary()
    assert summary["holds"] and sum(summary["sites_by_codec"].values()) == len(plan.guided_sites)


def test_a_choice_within_the_floor_but_not_within_the_margin_does_not_hold(calibration):
    # Mutation: the margin left out of `_holds`.
    cheapest = chosen(calibration, 100.0).chosen
    choice = chosen(calibration, floor=1.02 * cheapest.mean)
    assert choice.holds and choice.chosen.bytes_per_token > cheapest.bytes_per_token


@pytest.mark.parametrize("gate", ["none", "noise"])
def test_a_choice_is_verified_with_the_gate_of_its_plan(calibration, monkeypatch, gate):
    # Mutation: scoring the choice without bands.
    bed, plan, samples = calibration
    given, score = [], SameTokens.score

    def noted(self, *args, **options):
        given.append(options.get("bands"))
        return score(self, *args, **options)

    monkeypatch.setattr(SameTokens, "score", noted)
    gated = replace(plan, rules=replace(plan.rules, gate=gate), digest="")
    assert gated.digest == plan.digest
    choice = choose_rates(bed, gated, samples, floor=100.0, candidates=FEW)
    assert len(given) == 1 + len(choice.tries) and given[0] is None
    for bands in given[1:]:
        assert bands is None if gate == "none" else set(bands) == set(plan.guided_sites)


def test_candidates_that_the_schemes_cannot_decode_are_left_out(tiny, calibration):
    # Mutation: all candidates are tried; the first pass then refuses low bits of scales that compete.
    bed = calibration[0]
    policy, prompts = bed.policy, [bed.policy.tokenizer(text)["input_ids"] for text in PROMPTS[:1]]
    rules = replace(AUTO, activation="NVFP4_ROW_POW2_4OVER6_MSE", sites=("x",))
    plan = calibrated_plan(policy, rules, prompts=prompts, arithmetic=EMULATED)
    samples = bed.sample(plan, prompts, SamplingParams(max_tokens=8, n=1, seed=5))
    candidates = ("full", "mantissa_lean", "secded", "mantissa")
    choice = choose_rates(bed, plan, samples, floor=100.0, candidates=candidates)
    assert set(choice.codecs.values()) == {"mantissa"}


def test_samples_without_records_are_refused(calibration):
    bed, plan, samples = calibration
    bare = [replace(sample, record=None) for sample in samples]
    with pytest.raises(RecordError, match="without any"):
        choose_rates(bed, plan, bare, floor=1.0)


def test_sites_that_nothing_was_measured_at_are_refused_by_name(calibration):
    bed, plan, samples = calibration
    empty = [
        replace(sample, record=replace(sample.record, valid=torch.zeros_like(sample.record.valid)))
        for sample in samples
    ]
    with pytest.raises(RecordError, match=r"no valid row at \['layers\.0\.x'"):
        choose_rates(bed, plan, empty, floor=1.0, candidates=FEW)
    lacking = []
    for sample in samples:
        sites = {site: part for site, part in sample.record.sites.items() if site != Site("v", 1)}
        lacking.append(replace(sample, record=replace(sample.record, sites=sites)))
    with pytest.raises(RecordError, match=r"no valid row at \['layers\.1\.v'\]"):
        choose_rates(bed, plan, lacking, floor=1.0, candidates=FEW)


def test_candidates_are_codecs_the_first_keeps_everything_and_none_is_listed_twice():
    assert CANDIDATES[0] == "full" and len(set(CANDIDATES)) == len(CANDIDATES)
    assert all(codec_by_name(name).name == name for name in CANDIDATES)


def test_the_choice_is_part_of_the_plan_and_records_of_another_choice_are_refused(calibration):
    bed, plan, samples = calibration
    rich = plan.with_codecs(dict.fromkeys(plan.guided_sites, RICH))
    mixed = plan.with_codecs(dict.fromkeys(plan.guided_sites, RICH) | {Site("k", 1): POOR})
    assert len({plan.digest, rich.digest, mixed.digest}) == 3
    with pytest.raises(RecordError, match="plan digest"):
        bed.score(mixed, signed(samples, rich))


def test_signing_refuses_other_schemes(calibration):
    bed, _, samples = calibration
    bf16 = bed.plan(PlanRules(mode="bf16", guidance="none"))
    with pytest.raises(RecordError, match="scheme digest"):
        signed(samples, bf16)
    assert routing_only(samples[0], bf16).record.sites == {}


@pytest.fixture(scope="module")
def automatic(tiny, tmp_path_factory):
    """(config, manifest) of a run whose codecs were chosen."""
    path = tmp_path_factory.mktemp("auto") / "run"
    config = make_config(*tiny, path, quantization__guidance="auto", train__steps=2, task__reward=PLAIN)
    told = []
    manifest = train(config, on_event=told.append)
    assert any("BF16 floor" in line for line in told)
    return config, manifest


def test_the_choice_is_in_the_manifest_from_its_first_byte_on(tiny, tmp_path, monkeypatch):
    # Mutation: the choice is noted after the manifest was written: a kill between the two loses it for good.
    choice = RateChoice(
        codecs={}, floor=1.0, chosen=Try(limit=0.0, mean=0.5, bytes_per_token=7), holds=True, tries=()
    )
    monkeypatch.setattr(
        "tracefp4.rl.opening.calibrate_rates",
        lambda bed, made, *_, **__: replace(choice, codecs=dict.fromkeys(made.guided_sites, "full")),
    )
    written = []
    monkeypatch.setattr(
        RunDirectory, "write_json", lambda self, name, content: written.append((name, content))
    )
    config = make_config(*tiny, tmp_path / "run", quantization__guidance="auto")
    open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
    name, content = written[0]
    assert name == "manifest.json" and content["rates"]["bytes_per_token"] == 7


def test_a_run_keeps_its_records_in_the_chosen_codecs(automatic, tiny):
    config, manifest = automatic
    codecs = manifest["plan"]["codecs"]
    assert set(codecs) == {f"{layer}.{kind}" for layer in range(2) for kind in "xkv"}
    assert manifest["rates"]["floor"] > 0 and not manifest["plan"]["needs_calibration"]
    expected = price({Site(name[2:], int(name[0])): codec for name, codec in codecs.items()})
    assert [row["guidance_bytes_per_token"] for row in metrics_of(config)] == [expected] * 2
    # the last token of a sample was no input and has no record
    assert all(row["guidance/followed_fraction"] > 0.8 for row in metrics_of(config))
    plain = load_policy(tiny[0])
    assert (
        remembered_plan(plain.model, PlanRules(guidance="full"), summary=manifest["plan"]).digest
        != (manifest["plan"]["digest"])
    )


def test_a_resumed_run_takes_the_choice_from_its_manifest(automatic):
    # Mutation: remembered_plan without with_codecs.
    config, manifest = automatic
    run = open_run(config, RunDirectory(Path(config.run.dir), resume=True), resume=True)
    assert run.applied.plan.digest == manifest["plan"]["digest"]
    written = {f"{site.layer}.{site.kind}": name for site, name in run.applied.plan.codecs.items()}
    assert written == manifest["plan"]["codecs"]


def test_a_plan_written_down_without_codecs_is_refused(automatic, tiny):
    _, manifest = automatic
    policy = load_policy(tiny[0])
    with pytest.raises(ConfigError, match="has no codec for"):
        remembered_plan(policy.model, AUTO, summary={**manifest["plan"], "codecs": {}})
