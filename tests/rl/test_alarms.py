"""The alarm for static scales: it rings above its limit, names a site once, and hears what a run's updates round."""

import warnings
from dataclasses import replace

import pytest
import torch
from tests.rl.test_trainer import make_samples, update
from tests.rl.tiny_runs import changed, make_config

from tracefp4.errors import ConfigError
from tracefp4.guidance import Site
from tracefp4.rl.alarms import SaturationAlarm
from tracefp4.rl.following import Following
from tracefp4.rl.opening import open_run
from tracefp4.rl.run import config_digest
from tracefp4.rl.rundir import RunDirectory

K0, V1 = Site("k", 0), Site("v", 1)


def heard(alarm, **clamped):
    """(sites above the limit, what was warned of) when blocks of 100 at k 0 and v 1 were clamped."""
    following = Following()
    for site, name in ((K0, "k"), (V1, "v")):
        following.blocks[site], following.clamped[site] = 100, clamped.get(name, 0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        metrics = alarm.hear(following)
    return metrics["rounding/saturated_sites"], [str(warning.message) for warning in found]


def test_rft_5_the_alarm_rings_above_its_limit_and_names_a_site_once():
    alarm = SaturationAlarm(limit=0.05)
    assert heard(alarm, k=5) == (0, [])
    number, (text,) = heard(alarm, k=6)
    assert number == 1 and "layers.0.k (6.0%)" in text and "layers.1.v" not in text
    assert heard(alarm, k=60) == (1, [])
    number, (text,) = heard(alarm, k=60, v=7)
    assert number == 2 and "at layers.1.v (7.0%)" in text
    assert heard(alarm) == (0, [])
    assert heard(SaturationAlarm(limit=1.0), k=100) == (0, [])


def test_rft_5_a_run_whose_keys_outgrow_their_exponent_is_told(tiny, tmp_path):
    # Mutations: an alarm that no trainer tells; one share over all sites, which the others hold down.
    config = make_config(*tiny, tmp_path / "run")
    run = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics, _ = update(run.trainer, make_samples(run))
    assert metrics["rounding/saturated_sites"] == 0
    with torch.no_grad():
        run.applied.model.model.layers[1].self_attn.k_norm.weight.mul_(64)
    with pytest.warns(UserWarning, match=r"outgrown static scales.* at layers\.1\.k \(.*calibrates anew"):
        metrics, _ = update(run.trainer, make_samples(run))
    assert metrics["rounding/saturated_sites"] == 1
    assert 0.01 < metrics["rounding/clamped_fraction"] < 0.5


def test_the_limit_is_checked_and_may_change_in_a_resumed_run(tiny, tmp_path):
    config = make_config(*tiny, tmp_path / "run")
    assert config_digest(changed(config, train__saturation_alarm=0.5)) == config_digest(config)
    with pytest.raises(ConfigError, match=r"train\.saturation_alarm: got 1\.5; allowed: 0 to 1"):
        replace(config.train, saturation_alarm=1.5)
