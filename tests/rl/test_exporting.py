"""A run exports what its plan rounds: the right modules, the right bytes, and values that its engine computed with."""

import json
from dataclasses import replace

import pytest
import torch
from tests.rl.tiny_runs import make_config

from tracefp4.checkpoints import Checkpoint, Output, collect_statistics, inventory, load_fp4, select
from tracefp4.errors import ConfigError
from tracefp4.formats import NVFP4_KV, NVFP4_STATIC_POW2, SCHEMES, BlockTensor
from tracefp4.guidance import Site
from tracefp4.ops.quantize import quantize
from tracefp4.rl.deployment import load_deployed
from tracefp4.rl.exporting import check_scope, export_run
from tracefp4.rl.opening import open_run
from tracefp4.rl.rundir import RunDirectory


@pytest.fixture
def run_of(tiny, tmp_path):
    """A run that was opened and saved its checkpoint of step 3."""

    def make(**options):
        config = make_config(*tiny, tmp_path / "run", **options)
        found = open_run(config, RunDirectory(config.run.dir, resume=False), resume=False)
        found.step = 3
        found.save()
        return found

    return make


def _packed(path):
    """Names of the packed modules, from the file alone."""
    with Checkpoint(path) as opened:
        return {n.removesuffix(".weight_scale") for n in opened.specs if n.endswith(".weight_scale")}


def _planned(run):
    return {d.name for d in run.applied.plan.decisions if d.kind == "experts" and d.is_quantized}


def test_the_newest_checkpoint_becomes_the_bytes_of_its_plan(run_of, tmp_path):
    run = run_of()
    found = export_run(tmp_path / "run", Output(path=tmp_path / "out"), layout="modelopt")
    state = load_fp4(found.path).state
    scheme = SCHEMES[run.applied.plan.rules.weight]
    model = {name: value.detach().bfloat16() for name, value in run.applied.model.state_dict().items()}
    experts = 0
    for name, block in state.items():
        if isinstance(block, BlockTensor):
            experts += 1
            wanted = quantize(model[name], scheme=scheme)
            assert block.scheme == scheme and torch.equal(block.packed, wanted.packed)
            assert torch.equal(block.block_scales, wanted.block_scales) and torch.equal(
                block.outer, wanted.outer
            )
    assert experts == 2 * len(_planned(run)) > 0


@pytest.mark.parametrize("kept", [0, 1], ids=["all_layers", "last_layer_bf16"])
def test_exp_8_packed_is_what_the_trainer_rounds_and_what_the_config_says(kept, run_of, tmp_path):
    run = run_of(quantization__last_layers_bf16=kept)
    out = export_run(tmp_path / "run", Output(path=tmp_path / "out"), layout="compressed-tensors").path
    planned, packed = _planned(run), _packed(out)
    assert {module.rpartition(".experts.")[0] + ".experts" for module in packed} == planned
    config = json.loads((out / "config.json").read_bytes())["quantization_config"]
    with Checkpoint(run.directory.checkpoints / "step_000003") as source:
        linears = {linear.module for linear in inventory(source).linears}
    assert linears - set(config["ignore"]) == packed
    assert len(planned) == run.applied.model.config.num_hidden_layers - kept


def test_exp_8_any_difference_is_refused_with_both_lists(run_of, tmp_path):
    run = run_of()
    with Checkpoint(run.directory.checkpoints / "step_000003") as source:
        stock = inventory(source)
    chosen = select(stock, include=["model.layers.0.mlp.experts.*"])
    check_scope(["model.layers.0.mlp.experts"], chosen)
    with pytest.raises(
        ConfigError, match=r"only in the plan: \['model.layers.9.mlp.experts'\], only packed: \['model"
    ):
        check_scope(["model.layers.9.mlp.experts"], chosen)
    extra = next(linear for linear in stock.linears if linear.module == "model.layers.0.self_attn.q_proj")
    wider = replace(chosen, linears=(*chosen.linears, extra))
    with pytest.raises(ConfigError, match=r"plan: \[\], only packed: \['model.layers.0.self_attn.q_proj'\]"):
        check_scope(["model.layers.0.mlp.experts"], wider)
    # a pattern that matches nothing is an error, so a typo cannot narrow the scope
    with pytest.raises(ConfigError, match="matches no module"):
        select(stock, include=["model.layers.0.mlp.expert.*"])


def test_a_torn_checkpoint_is_passed_over_and_none_is_an_error(run_of, tmp_path):
    run = run_of()
    run.step = 4
    run.save()
    newest = run.directory.checkpoints / "step_000004"
    (newest / "rng.json").write_text("{}")
    export_run(tmp_path / "run", Output(path=tmp_path / "out"), layout="modelopt")
    for path in (newest, tmp_path):
        with pytest.raises(ConfigError, match="holds no whole checkpoint"):
            export_run(path, Output(path=tmp_path / "other"), layout="modelopt")
    one = export_run(newest.with_name("step_000003"), Output(path=tmp_path / "one"), layout="modelopt")
    assert _packed(one.path) == _packed(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "bf16", "guidance": "none"}, "mode = 'bf16'"),
        ({"weight": "none"}, "weight = 'none'"),
        ({"exclude": ("*.mlp.experts",), "sites": ("k",)}, r"exclude = \['\*\.mlp\.experts'\]"),
    ],
    ids=["mode", "weight", "exclude"],
)
def test_a_run_that_rounded_no_weights_is_refused(options, reason, run_of, tmp_path):
    run_of(**{f"quantization__{name}": value for name, value in options.items()})
    with pytest.raises(
        ConfigError, match=rf"experts in bf16 .*{reason}.*tracefp4 quantize .*step_000003 OUT"
    ):
        export_run(tmp_path / "run", Output(path=tmp_path / "out"), layout="modelopt")


@pytest.mark.parametrize(
    ("weight", "layout", "reason"),
    [
        ("NVFP4_TENSOR_FP32", "compressed-tensors", "NVFP4_TENSOR_FP32, whose outer scale is a multiplier"),
        ("NVFP4_FOUROVERSIX", "modelopt", "NVFP4_FOUROVERSIX, whose outer scale is a amax"),
        ("NVFP4_TENSOR_POW2", "gpt-oss", "NVFP4_TENSOR_POW2"),
    ],
)
def test_a_scheme_that_a_layout_cannot_hold_is_refused(weight, layout, reason, run_of, tmp_path):
    run_of(quantization__weight=weight)
    with pytest.raises(ConfigError, match=f"{layout} cannot hold {reason}"):
        export_run(tmp_path / "run", Output(path=tmp_path / "out"), layout=layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv": "none", "sites": ("x",)}, {"scheme": None, "exponents": {}}),
        ({"exclude": ("model.layers.0.self_attn.kv_cache",)}, {"1"}),
        ({}, {"0", "1"}),
    ],
    ids=["bf16", "one layer", "both"],
)
def test_how_the_run_rounds_its_cache_is_written_down(options, expected, run_of, tmp_path):
    # Mutations: a cache in bf16 is written as unknown; layers without a cache get exponents.
    changes = {"activation": "none", "sites": ("k", "v"), "guidance": "none", **options}
    run = run_of(**{f"quantization__{name}": value for name, value in changes.items()})
    out = export_run(tmp_path / "run", Output(path=tmp_path / "out"), layout="modelopt").path
    cache = json.loads((out / "tracefp4.json").read_bytes())["cache"]
    if isinstance(expected, dict):
        assert cache == expected
    else:
        assert cache["scheme"] == {"scheme": "NVFP4_KV", "digest": NVFP4_KV.digest}
        exponents = run.applied.plan.static_exponents
        assert cache["exponents"] == {
            n: [exponents[Site("k", int(n))], exponents[Site("v", int(n))]] for n in expected
        }
    assert load_deployed(out).plan.digest == run.applied.plan.digest


def test_inputs_follow_the_run_and_differences_are_said(run_of, tmp_path):
    # Mutations: static inputs are dropped silently; statistics replace the run's exponents.
    run_of()
    statistics = statistics_of(tmp_path)

    def exported(**options):
        return export_run(
            tmp_path / "run", Output(path=tmp_path / "out", overwrite=True), layout="modelopt", **options
        )

    (note,) = exported().notes
    assert (
        note
        == "inputs were rounded under NVFP4_ROW_POW2 in training; this file leaves them in high precision"
    )
    (note,) = exported(activations="static", statistics=statistics).notes
    assert note == (
        "inputs were rounded under NVFP4_ROW_POW2 in training; this file rounds them under calibrated static scales"
    )
    with pytest.raises(ConfigError, match="without static inputs; got calibration .*--activations static"):
        exported(statistics=statistics)
    with pytest.raises(ConfigError, match="Static activations need calibration statistics"):
        exported(activations="static")


def test_static_inputs_of_a_run_need_no_statistics_and_take_none(run_of, tmp_path):
    run = run_of(quantization__activation="NVFP4_STATIC_POW2")
    output = Output(path=tmp_path / "out", overwrite=True)
    exponents = run.applied.plan.static_exponents
    for activations in (None, "static"):
        found = export_run(tmp_path / "run", output, layout="modelopt", activations=activations)
        assert found.notes == ()
        loaded = load_fp4(found.path)
        assert loaded.activation == NVFP4_STATIC_POW2
        assert loaded.exponents == {n: (exponents[Site("x", n)], exponents[Site("w2", n)]) for n in (0, 1)}
    with pytest.raises(ConfigError, match="exponents of its own.*Leave --calibration out"):
        export_run(tmp_path / "run", output, layout="modelopt", statistics=statistics_of(tmp_path))
    found = export_run(tmp_path / "run", output, layout="modelopt", activations="w4a16")
    assert found.notes[0].startswith(
        "inputs were rounded under NVFP4_STATIC_POW2 in training; this file leaves"
    )
    assert load_fp4(found.path).activation is None


def statistics_of(tmp_path):
    """Statistics of the run's checkpoint."""
    texts = tmp_path / "texts.txt"
    texts.write_text("one two 2 three 33 four 4444 five 6\n" * 20)
    start = tmp_path / "run" / "checkpoints" / "step_000003"
    return collect_statistics(start, texts, max_tokens=256, sequence_length=64)
