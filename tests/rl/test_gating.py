"""A run's noise gate: measured before the first update, in the trainer's bands, restored on resume."""

import json
from dataclasses import replace

import pytest
from tests.rl.test_trainer import make_samples
from tests.rl.tiny_runs import make_config

from tracefp4.errors import ConfigError
from tracefp4.rl.checkpoint import latest, load_state
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.run import config_digest
from tracefp4.rl.rundir import RunDirectory

GATED = {"quantization__gate": "noise"}


def open_tiny(tiny, path, **changes):
    config = make_config(*tiny, path, **changes)
    return open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)


def metrics_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_the_first_step_measures_even_if_nothing_else_asks_for_it(tiny, tmp_path):
    train(make_config(*tiny, tmp_path / "run", train__agreement_every=0, **GATED))
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["gate/band_median"] > 0
    assert all("gate/band_median" not in row for row in rows[1:])
    assert all(row["guidance/followed_values_fraction"] < 0.6 for row in rows if row.get("grad_norm"))


def test_without_the_gate_every_recorded_value_is_followed(tiny, tmp_path):
    train(make_config(*tiny, tmp_path / "run", quantization__gate="none"))
    rows = metrics_of(tmp_path / "run")
    assert not any(name.startswith("gate/") for row in rows for name in row)
    assert all(row["guidance/followed_values_fraction"] > 0.8 for row in rows if row.get("grad_norm"))


def test_bands_reach_the_trainer_and_cover_its_guided_sites(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", **GATED)
    assert run.trainer.bands is None and run.gating.needs_measurement
    run.gating.observe(run.trainer.score(make_samples(run), measure=True))
    assert run.trainer.bands is not None and not run.gating.needs_measurement
    assert set(run.trainer.bands) == set(run.trainer.plan.guided_sites)


def test_a_site_that_was_not_measured_borrows_its_band(tiny, tmp_path):
    # Mutation: bands of the measured sites alone: a site without one is followed everywhere, as if there were no gate.
    run = open_tiny(tiny, tmp_path / "run", **GATED)
    scored = run.trainer.score(make_samples(run), measure=True)
    site = run.trainer.plan.guided_sites[0]
    run.gating.observe(replace(scored, noise={at: found for at, found in scored.noise.items() if at != site}))
    assert set(run.trainer.bands) == set(run.trainer.plan.guided_sites)
    assert site in run.gating.gate.borrowed
    run.gating.observe(scored)
    assert run.gating.gate.histograms[site] == scored.noise[site]


def test_an_ungated_run_ignores_measurements(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", quantization__gate="none")
    assert run.gating.observe(run.trainer.score(make_samples(run), measure=True)) == {}
    assert run.trainer.bands is None and not run.gating.needs_measurement


def test_a_later_measurement_is_mixed_in(tiny, tmp_path):
    run = open_tiny(tiny, tmp_path / "run", **GATED)
    scored = run.trainer.score(make_samples(run), measure=True)
    run.gating.observe(scored)
    before = run.gating.gate
    run.gating.observe(scored)
    site = next(iter(before.histograms))
    once, twice = before.histograms[site], run.gating.gate.histograms[site]
    assert sum(twice.values) == pytest.approx(1.7 * sum(once.values))


def test_a_resumed_run_has_the_gate_of_its_checkpoint(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run", **GATED)
    manifest = train(config)
    state = load_state(latest(tmp_path / "run" / "checkpoints"))
    assert state.gate["histograms"]
    assert manifest["final"]["gate"]["num_sites"] == len(state.gate["histograms"])
    longer = replace(config, train=replace(config.train, steps=config.train.steps + 1))
    run = open_run(longer, RunDirectory(config.run.dir, resume=True), resume=True)
    assert run.gating.state() == state.gate
    assert run.trainer.bands == run.gating.gate.bands


def test_the_gate_is_in_the_settings_of_a_run_and_not_in_its_plan(tiny, tmp_path):
    plain, gated = make_config(*tiny, tmp_path / "a"), make_config(*tiny, tmp_path / "b", **GATED)
    assert config_digest(plain) != config_digest(gated)
    one, other = open_tiny(tiny, tmp_path / "a"), open_tiny(tiny, tmp_path / "b", **GATED)
    assert one.applied.plan.digest == other.applied.plan.digest


def test_with_a_gate_measurements_are_settings_that_a_resumed_run_keeps(tiny, tmp_path):
    gated = make_config(*tiny, tmp_path / "a", **GATED)
    more = replace(gated, train=replace(gated.train, agreement_samples=gated.train.agreement_samples + 1))
    assert config_digest(gated) != config_digest(more)
    plain = make_config(*tiny, tmp_path / "a", quantization__gate="none")
    other = replace(plain, train=replace(plain.train, agreement_samples=plain.train.agreement_samples + 1))
    assert config_digest(plain) == config_digest(other)


def test_a_gate_without_guidance_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="quantization.gate: got 'noise'.*leaves nothing to gate"):
        make_config(*tiny, tmp_path / "run", quantization__guidance="none", **GATED)


def test_a_gated_plan_without_guidance_has_no_gate(tiny, tmp_path):
    plan = open_tiny(tiny, tmp_path / "run", **GATED).applied.plan
    assert (plan.rules.gate, plan.without_guidance().rules.gate) == ("noise", "none")
