"""The pipeline: right bytes from the right matrices, errors as they are, refusals, and nothing torn."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tests.checkpoints.fp4 import files, quantized, read, rewrite, save_wide, statistics_of
from tests.checkpoints.tiny_families import save_tiny

from tracefp4.checkpoints import (
    Checkpoint,
    Output,
    PackedCheckpoint,
    Settings,
    change_layout,
    inventory,
    quantize_checkpoint,
    select,
    to_plain,
)
from tracefp4.checkpoints.coded import is_on_grid
from tracefp4.checkpoints.measure import measure
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import SCHEMES
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.search_scales import search_scales

POW2 = SCHEMES["NVFP4_TENSOR_POW2"]


@pytest.fixture
def model(tmp_path):
    """A tiny Qwen3 mixture, saved in tmp_path / m."""
    return save_wide("qwen3_moe", tmp_path / "m")


def _fused(model, layer, leaf):
    return dict(model.named_parameters())[f"model.layers.{layer}.mlp.experts.{leaf}"].detach()


def _blocks(out):
    with PackedCheckpoint(out) as packed:
        return {linear.module: packed.read_block(linear) for linear in packed.linears}


@pytest.mark.parametrize(
    ("method", "scheme"), [("nearest", "NVFP4_TENSOR_POW2"), ("4over6", "NVFP4_TENSOR_POW2_4OVER6_MSE")]
)
def test_an_expert_is_quantized_as_the_matrix_that_an_engine_runs(method, scheme, model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q", method=method).path
    blocks = _blocks(out)
    for layer in range(2):
        gate_up = quantize(_fused(model, layer, "gate_up_proj"), scheme=SCHEMES[scheme])
        down = quantize(_fused(model, layer, "down_proj"), scheme=SCHEMES[scheme])
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up = blocks[f"{prefix}.gate_proj"], blocks[f"{prefix}.up_proj"]
            assert torch.equal(torch.cat((gate.packed, up.packed)), gate_up.packed[expert])
            assert torch.equal(torch.cat((gate.block_scales, up.block_scales)), gate_up.block_scales[expert])
            assert gate.outer == up.outer == gate_up.outer[expert]
            assert torch.equal(blocks[f"{prefix}.down_proj"].packed, down.packed[expert])
            assert gate.scheme == SCHEMES[scheme]


def test_h_scale_weighs_by_what_the_experts_saw(model, tmp_path):
    statistics = statistics_of(tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", method="h-scale", statistics=statistics).path
    blocks = _blocks(out)
    for role, leaf in (("gate", "gate_up_proj"), ("down", "down_proj")):
        importance = statistics.importance(1, role, expert=2, width=32)
        wanted = search_scales(_fused(model, 1, leaf)[2], importance=importance, scheme=POW2)
        found = blocks[f"model.layers.1.mlp.experts.2.{role}_proj"]
        assert torch.equal(found.packed, wanted.packed[: len(found.packed)])
        assert torch.equal(found.block_scales, wanted.block_scales[: len(found.packed)])
    nearest = quantize(_fused(model, 1, "gate_up_proj")[2], scheme=POW2)
    importance = statistics.importance(1, "gate", expert=2, width=32)
    assert not torch.equal(
        search_scales(_fused(model, 1, "gate_up_proj")[2], importance=importance, scheme=POW2).packed,
        nearest.packed,
    )


def test_lay_5_gate_and_up_are_found_in_either_layout(tmp_path):
    """The same matrices, gate above up in one family and alternating in the other, become the same bytes."""
    save_wide("qwen3_moe", tmp_path / "a")
    save_wide("gpt_oss", tmp_path / "b")
    tensors, experts = read(tmp_path / "b"), read(tmp_path / "a")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for expert in range(4):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        tensors[name][expert, :, 0::2] = experts[f"{prefix}.gate_proj.weight"].t()
        tensors[name][expert, :, 1::2] = experts[f"{prefix}.up_proj.weight"].t()
    rewrite(tmp_path / "b", tensors)
    ours, theirs = (_blocks(quantized(tmp_path / n, tmp_path / f"q{n}").path) for n in ("a", "b"))
    for expert in range(4):
        for leaf in ("gate_proj", "up_proj"):
            module = f"model.layers.0.mlp.experts.{expert}.{leaf}"
            assert torch.equal(ours[module].packed, theirs[module].packed)
            assert torch.equal(ours[module].outer, theirs[module].outer)


def test_shr_3_q_k_and_v_share_one_outer_scale(model, tmp_path):
    tensors = read(tmp_path / "m")
    for leaf, amax in (("q_proj", 3.0), ("k_proj", 6.0), ("v_proj", 2.0)):
        tensors[f"model.layers.0.self_attn.{leaf}.weight"][0, 0] = amax
    rewrite(tmp_path / "m", tensors)
    out = quantized(
        tmp_path / "m",
        tmp_path / "q",
        scheme="NVFP4_TENSOR_FP32",
        layout="modelopt",
        include=("*.self_attn.?_proj",),
    ).path
    found = read(out)
    scales = {float(found[f"model.layers.0.self_attn.{leaf}_proj.weight_scale_2"]) for leaf in "qkv"}
    assert scales == {float(torch.tensor(6.0) / torch.tensor(2688.0))}
    assert float(found["model.layers.0.self_attn.o_proj.weight_scale_2"]) not in scales


def test_shr_3_a_v_that_is_a_copy_of_k_has_scales_of_its_own(model, tmp_path):
    from safetensors.torch import save_file

    tensors = read(tmp_path / "m")
    prefix = "model.layers.0.self_attn."
    del tensors[f"{prefix}v_proj.weight"]
    metadata = {"format": "pt", f"{prefix}v_proj.weight": f"{prefix}k_proj.weight"}
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata=metadata)
    found = read(quantized(tmp_path / "m", tmp_path / "q", include=("*.0.self_attn.[qkv]_proj",)).path)
    for leaf in ("weight_packed", "weight_scale", "weight_global_scale"):
        k, v = (found[f"{prefix}{role}_proj.{leaf}"] for role in "kv")
        assert torch.equal(k.view(torch.uint8), v.view(torch.uint8))
    # nor is a copy lost when it is not quantized
    plain = read(quantized(tmp_path / "m", tmp_path / "r").path)
    assert torch.equal(plain[f"{prefix}v_proj.weight"], tensors[f"{prefix}k_proj.weight"])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_exp_4_a_tied_head_leaves_the_embedding_as_it_is(family, tmp_path):
    save_wide(family, tmp_path / "m", tie_word_embeddings=True)
    found = quantized(tmp_path / "m", tmp_path / "q", include=("*",))
    before, after = read(tmp_path / "m"), read(found.path)
    name = "model.embed_tokens.weight"
    assert torch.equal(before[name], after[name]) and "lm_head.weight" not in after
    assert any("lm_head stays in high precision: it is tied" in note for note in found.notes)
    with PackedCheckpoint(found.path) as packed:
        assert packed.config["tie_word_embeddings"] is True and packed.ties_embeddings


def test_the_errors_are_those_of_the_values(model, tmp_path):
    found = quantized(tmp_path / "m", tmp_path / "q")
    blocks, plain = _blocks(found.path), read(tmp_path / "m")
    assert found.errors.keys() == blocks.keys() and set(found.kinds.values()) == {"expert"}
    for module, error in found.errors.items():
        weight, value = plain[f"{module}.weight"].double(), dequantize(blocks[module], dtype=torch.float64)
        relative = float((weight - value).norm() / weight.norm())
        assert error.relative_error == pytest.approx(relative, rel=1e-6)
        assert error.sqnr_db == pytest.approx(-20 * torch.tensor(relative).log10().item(), rel=1e-5)
        assert error.max_error == pytest.approx(float((weight - value).abs().max()), rel=1e-6)
        assert error.zero_fraction == float((value == 0).double().mean())
        assert (error.saturated_values, error.lost_blocks) == (0, 0)


def test_saturated_values_and_lost_blocks_are_counted():
    weight = torch.zeros(1, 64)
    weight[0, 0] = 7.5  # FLOOR: 2^0, so the grid ends at 6
    weight[0, 32:34] = torch.tensor([1.0, 0.1])
    error = measure(weight, quantize(weight, scheme=SCHEMES["MXFP4_FLOOR"]), name="m")
    assert (error.saturated_values, error.lost_blocks) == (1, 0)
    # under the outer scale of 2688 the second block's scale would be 0; this scheme flushes it
    weight = torch.cat((torch.full((1, 16), 2688.0), torch.full((1, 16), 1e-4)), dim=1)
    error = measure(weight, quantize(weight, scheme=SCHEMES["NVFP4_VLLM"]), name="m")
    assert (error.saturated_values, error.lost_blocks, error.zero_fraction) == (0, 1, 0.5)


@pytest.mark.parametrize("size", [2.0**-120, 2.0**100], ids=["tiny", "huge"])
def test_errors_are_right_where_squares_leave_float32(size):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    lost = quantize(weight, scheme=POW2)
    lost.packed.zero_()
    assert measure(weight, lost, name="w").relative_error == pytest.approx(1.0)
    assert (
        0.05
        < measure(weight, quantize(weight, scheme=SCHEMES["NVFP4_TENSOR_FP32"]), name="w").relative_error
        < 0.2
    )


@pytest.mark.parametrize("where", ["itself", "above", "two above"])
def test_the_source_is_never_replaced(where, model, tmp_path):
    before = files(tmp_path / "m")
    out = {"itself": tmp_path / "m", "above": tmp_path, "two above": tmp_path.parent}[where]
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="Name another directory"):
            quantize_checkpoint(tmp_path / "m", Output(path=out, overwrite=overwrite), Settings(scheme=POW2))
    assert files(tmp_path / "m") == before


def test_exp_5_an_export_is_not_quantized_again(model, tmp_path):
    for layout in ("compressed-tensors", "modelopt"):
        out = quantized(tmp_path / "m", tmp_path / layout, layout=layout).path
        with pytest.raises(ConfigError, match=r"already quantized: its config says .*tracefp4 import"):
            quantized(out, tmp_path / "again")
    # the old form of ModelOpt says it in a file of its own only
    config = files(out)["config.json"].replace(b"quantization_config", b"something_else")
    (out / "config.json").write_bytes(config)
    with pytest.raises(ConfigError, match="already quantized"):
        quantized(out, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_fp8_release_is_refused_with_advice_that_helps(model, tmp_path):
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"\(fp8\).*or a bf16 release of the model"):
        quantized(tmp_path / "m", tmp_path / "q")


def test_exp_5_an_imported_checkpoint_is_exported_and_not_quantized(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    plain = to_plain(out, Output(path=tmp_path / "p"))
    with pytest.raises(ConfigError, match=r"already quantized: its tracefp4.json .*tracefp4 export"):
        quantized(plain, tmp_path / "again")


@pytest.mark.parametrize("scheme", ["NVFP4_TENSOR_POW2", "NVFP4_TENSOR_FP32", "MXFP4_EVEN", "NVFP4_ROW_POW2"])
def test_exp_5_weights_on_a_grid_are_refused_without_any_mark(scheme, model, tmp_path):
    tensors = read(tmp_path / "m")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    # bf16, as another program would have saved them: rounded again where the outer scale is float32
    tensors[name] = dequantize(quantize(tensors[name], scheme=SCHEMES[scheme])).bfloat16()
    rewrite(tmp_path / "m", tensors)
    with pytest.raises(ConfigError, match=r"experts\.3\.down_proj is already quantized: every block"):
        quantized(tmp_path / "m", tmp_path / "q")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_exp_5_the_case_itself():
    """Codes 6..1 under scale 1 lie on a grid, and quantizing them afresh changes them: hence the refusal."""
    x = torch.zeros(1, 32)
    x[0, 0] = 2688.0
    x[0, 16:22] = torch.tensor([4.0, 3.0, 2.0, 1.5, 1.0, 0.5])
    assert is_on_grid(x)
    fresh = quantize(x, scheme=POW2)
    assert int(fresh.block_scales[0, 1]) == 0x33
    assert dequantize(fresh)[0, 16:22].tolist() == [4.125, 2.75, 2.0625, 1.375, 1.03125, 0.34375]


def test_random_weights_are_on_no_grid():
    for seed in range(50):
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        assert not is_on_grid(weight) and not is_on_grid(weight.bfloat16())
        weight[:, 3:] = 0  # sparse, yet every block holds three magnitudes
        assert not is_on_grid(weight)
    # zeros, constants and signs prove nothing
    assert not is_on_grid(torch.zeros(4, 32)) and not is_on_grid(torch.ones(4, 32))
    assert not is_on_grid(torch.randn(4, 32).sign())


def test_a_weight_that_is_not_finite_is_refused_by_name(model, tmp_path):
    tensors = read(tmp_path / "m")
    tensors["model.layers.1.mlp.experts.0.up_proj.weight"][7, 3] = float("nan")
    rewrite(tmp_path / "m", tensors)
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts\.0\.up_proj holds NaN or Inf"):
        quantized(tmp_path / "m", tmp_path / "q")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "gptq"}, "Unknown method 'gptq'"),
        ({"activations": "dynamic"}, "Unknown activations 'dynamic'"),
        ({"layout": "gguf"}, "Unknown layout 'gguf'"),
        ({"method": "h-scale"}, "needs? calibration statistics"),
        ({"activations": "static"}, "needs? calibration statistics"),
        ({"method": "4over6", "scheme": "MXFP4_EVEN"}, "needs an NVFP4 scheme"),
        ({"method": "4over6", "scheme": "NVFP4_VLLM"}, "four-over-six sibling"),
        ({"exclude": ("*",)}, "Nothing is left"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_settings_that_do_not_fit_are_refused(settings, message, model, tmp_path):
    with pytest.raises(ConfigError, match=message):
        quantized(tmp_path / "m", tmp_path / "q", **settings)


def test_attention_has_no_statistics(model, tmp_path):
    with pytest.raises(ConfigError, match=r"self_attn\.k_proj has no calibration statistics"):
        quantized(
            tmp_path / "m",
            tmp_path / "q",
            method="h-scale",
            include=("*.self_attn.?_proj", "*.experts.*"),
            statistics=statistics_of(tmp_path / "m"),
        )


def test_statistics_of_another_model_or_without_a_layer_are_refused(model, tmp_path):
    found = statistics_of(tmp_path / "m")
    with pytest.raises(ConfigError, match="model of shape"):
        quantized(tmp_path / "m", tmp_path / "q", method="h-scale", statistics=replace(found, model="0" * 16))
    fewer = replace(found, layers={0: found.layers[0]})
    with pytest.raises(ConfigError, match="hold no layer 1"):
        quantized(tmp_path / "m", tmp_path / "q", activations="static", statistics=fewer)


def test_statistics_that_nothing_reads_are_refused_and_not_written_down(model, tmp_path):
    with pytest.raises(ConfigError, match="nothing reads them; got method nearest and activations w4a16"):
        quantized(tmp_path / "m", tmp_path / "q", statistics=statistics_of(tmp_path / "m"))
    assert not (tmp_path / "q").exists()


def test_a_width_that_is_no_multiple_of_the_block_is_refused_before_anything_is_written(tmp_path):
    save_tiny("qwen3_moe", tmp_path / "m")  # experts are 16 wide inside
    with pytest.raises(ConfigError, match=r"down_proj of shape \(32, 16\) does not fit MXFP4_EVEN \(8 such"):
        quantized(tmp_path / "m", tmp_path / "q", scheme="MXFP4_EVEN")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_two_runs_and_any_shard_size_give_the_same_tensors(model, tmp_path):
    one = quantized(tmp_path / "m", tmp_path / "a").path
    assert files(one) == files(quantized(tmp_path / "m", tmp_path / "b").path)
    sharded = quantize_checkpoint(
        tmp_path / "m", Output(path=tmp_path / "c", max_shard_bytes=5000), Settings(scheme=POW2)
    ).path
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    ours, theirs = read(one), read(sharded)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours)


def test_everything_else_is_carried_over(model, tmp_path):
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    out = quantized(tmp_path / "m", tmp_path / "q").path
    assert sorted(files(out)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tracefp4.json",
    ]  # fmt: skip
    with Checkpoint(tmp_path / "m") as before, Checkpoint(out) as after:
        config = dict(after.config)
        config.pop("quantization_config")
        assert config == before.config


def test_progress_counts_up_to_all_bytes(model, tmp_path):
    seen = []
    quantize_checkpoint(
        tmp_path / "m",
        Output(path=tmp_path / "q"),
        Settings(scheme=POW2),
        progress=lambda done, total: seen.append((done, total)),
    )
    with Checkpoint(tmp_path / "m") as source:
        assert {total for _, total in seen} == {source.total_bytes}
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len(seen) > 20


def test_a_selection_may_be_refused_before_anything_is_written(model, tmp_path):
    def check(chosen):
        assert len(chosen.linears) == 24
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        quantize_checkpoint(tmp_path / "m", Output(path=tmp_path / "q"), Settings(scheme=POW2), check=check)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tracefp4.checkpoints import Output, Settings, quantize_checkpoint
from tracefp4.formats import NVFP4_TENSOR_POW2

def progress(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

quantize_checkpoint(
    sys.argv[1], Output(path=Path(sys.argv[2]), overwrite=True), Settings(scheme=NVFP4_TENSOR_POW2), progress=progress
)
"""


@pytest.mark.parametrize("is_replaced", [False, True], ids=["new", "over_an_old_one"])
def test_a_killed_export_leaves_nothing_that_loads(is_replaced, model, tmp_path):
    old = (
        files(quantized(tmp_path / "m", tmp_path / "q", exclude=("*.layers.1.*",)).path)
        if is_replaced
        else None
    )
    command = [sys.executable, "-c", KILLED, str(tmp_path / "m"), str(tmp_path / "q")]
    result = subprocess.run(command, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == -signal.SIGKILL
    if old is None:
        assert not (tmp_path / "q").exists()
    else:
        assert files(tmp_path / "q") == old
    for path in tmp_path.iterdir():
        assert path.name in ("m", "q") or not (path / "config.json").exists()
    # the next export clears up
    made = quantize_checkpoint(
        tmp_path / "m", Output(path=tmp_path / "q", overwrite=True), Settings(scheme=POW2)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"] and len(made.errors) == 24


def test_groups_with_biases_split_them(tmp_path):
    """Fused experts of gpt-oss become single ones in the layouts that store experts apart, biases with them."""
    model = save_wide("gpt_oss", tmp_path / "m")
    bias = dict(model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj_bias"].detach()
    bias.copy_(torch.randn_like(bias))
    model.save_pretrained(tmp_path / "m")
    tensors = read(quantized(tmp_path / "m", tmp_path / "q").path)
    prefix = "model.layers.0.mlp.experts"
    assert f"{prefix}.gate_up_proj_bias" not in tensors
    for expert in range(4):
        assert torch.equal(tensors[f"{prefix}.{expert}.gate_proj.bias"], bias[expert, 0::2])
        assert torch.equal(tensors[f"{prefix}.{expert}.up_proj.bias"], bias[expert, 1::2])


def test_selection_is_that_of_the_room(model, tmp_path):
    found = quantized(tmp_path / "m", tmp_path / "q", exclude=("*.layers.0.*",))
    with Checkpoint(tmp_path / "m") as source:
        chosen = select(inventory(source), exclude=("*.layers.0.*",))
    assert set(found.errors) == {linear.module for linear in chosen.linears}
    changed = change_layout(found.path, Output(path=tmp_path / "o"), "modelopt")
    assert set(_blocks(changed)) == set(found.errors)
