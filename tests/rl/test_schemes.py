"""Whole runs under other schemes than the default: MXFP4 that is followed, static activations, weights alone."""

from dataclasses import replace

import pytest
from tests.rl.tiny_runs import SHAPE, changed, make_checkpoint, make_config, metrics_of

from tracefp4.errors import ConfigError
from tracefp4.guidance import Site
from tracefp4.rl.deployment import load_deployed
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory

PLAIN = "tests.rl.tiny_runs:share_plain"
MXFP4 = {"quantization__activation": "MXFP4_RCEIL", "quantization__weight": "MXFP4_RCEIL"}
STATIC = {"quantization__activation": "NVFP4_STATIC_POW2"}


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """(checkpoint, prompts), widths multiples of 32."""
    shape = replace(SHAPE, expert_size=32)
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "start", shape=shape), tiny[1]


@pytest.mark.parametrize("changes", [MXFP4, STATIC], ids=["mxfp4", "static"])
def test_guided_training_follows_the_rollouts_decisions(wide, tmp_path, changes):
    # Mutations: records of another block size are dropped; a static site is recorded and not followed.
    sites = {"quantization__sites": ("x", "w2", "k", "v"), "task__reward": PLAIN, "train__steps": 2}
    config = make_config(*wide, tmp_path / "run", **changes, **sites, train__agreement_every=1)
    train(config)
    rows = metrics_of(config)
    assert len(rows) == 2
    for row in rows:
        assert row["guidance/followed_fraction"] > 0.7
        assert 0 <= row["guidance/changed_fraction"] < 0.2
        assert row["trained_samples"] > 0 and row["grad_norm"] > 0
        assert row["rounding/clamped_fraction"] == 0 and row["rounding/floored_fraction"] < 0.01
    mismatch = [
        row[name] for row in rows for name in row if name.startswith("agreement/x/") and "mismatch" in name
    ]
    assert mismatch and max(mismatch) < 0.2


def test_a_resumed_or_deployed_run_takes_the_static_exponents_of_its_plan(wide, tmp_path):
    # Mutation: activations calibrated again on weights that have moved.
    config = make_config(*wide, tmp_path / "run", **STATIC, task__reward=PLAIN, train__steps=1)
    manifest = train(config)
    plan_made = manifest["plan"]
    assert set(plan_made["static_exponents"]) == {
        f"{n}.{kind}" for n in (0, 1) for kind in ("x", "w2", "k", "v")
    }
    run = open_run(changed(config, train__steps=2), RunDirectory(config.run.dir, resume=True), resume=True)
    assert run.trainer.plan.digest == plan_made["digest"]
    assert run.trainer.plan.static_exponents[Site("w2", 1)] == plan_made["static_exponents"]["1.w2"] != 0
    path = tmp_path / "run" / "checkpoints" / "step_000001"
    assert load_deployed(path).plan.digest == plan_made["digest"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization__activation": "NVFP4_ROW_FP32"}, "site 0.x cannot be guided under NVFP4_ROW_FP32"),
        ({"quantization__activation": "NVFP4_TENSOR_POW2"}, "depend on its neighbours"),
        ({"quantization__activation": "NVFP4_ROW_4OVER6"}, r"^quantization\.activation: Unknown scheme"),
        ({"quantization__weight": "NVFP4_ROW_4OVER6"}, r"^quantization\.weight: Unknown scheme"),
        ({"quantization__kv": "NVFP4_ROW_4OVER6"}, r"^quantization\.kv: Unknown scheme"),
    ],
    ids=["float32 guided", "tensor activations", "unknown activation", "unknown weight", "unknown kv"],
)
def test_rules_that_cannot_be_followed_are_refused_before_anything_runs(wide, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(make_config(*wide, tmp_path / "run", **changes))


def test_float32_scales_and_weights_alone_train_unguided(wide, tmp_path):
    unguided = {"quantization__guidance": "none", "task__reward": PLAIN, "train__steps": 1}
    for name, changes in {
        "float32": {
            "quantization__activation": "NVFP4_ROW_FP32",
            "quantization__weight": "NVFP4_TENSOR_FP32",
        },
        "weights": {"quantization__activation": "none"},
    }.items():
        config = make_config(*wide, tmp_path / name, **unguided, **changes)
        train(config)
        (row,) = metrics_of(config)
        assert row["grad_norm"] > 0 and "guidance/followed_fraction" not in row
        assert row["rounding/clipped_fraction"] == 0
