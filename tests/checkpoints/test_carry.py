"""Bytes that are carried: into another layout, into a plain checkpoint and back, every one of them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoints.fp4 import files, quantized, read, rewrite, save_wide, statistics_of
from tests.checkpoints.tiny_families import FAMILIES
from transformers import AutoModelForCausalLM

from tracefp4.checkpoints import Output, change_layout, from_plain, is_imported, load_fp4, to_plain
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import BlockTensor
from tracefp4.ops.dequantize import dequantize

SCHEMES_BY_LAYOUT = [
    ("compressed-tensors", "NVFP4_TENSOR_POW2"),
    ("compressed-tensors", "NVFP4_COMPRESSED_TENSORS"),
    ("compressed-tensors", "NVFP4_TENSOR_POW2_4OVER6_MSE"),
    ("compressed-tensors", "MXFP4_EVEN"),
    ("modelopt", "NVFP4_TENSOR_POW2"),
    ("modelopt", "NVFP4_MODELOPT"),
    ("modelopt", "NVFP4_TENSOR_FP32_4OVER6_MSE"),
]


@pytest.fixture
def model(tmp_path):
    """A tiny Qwen3 mixture, saved in tmp_path / m."""
    return save_wide("qwen3_moe", tmp_path / "m")


def _same(one, other):
    ours, theirs = files(one), files(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("layout", "scheme"), SCHEMES_BY_LAYOUT)
def test_export_import_export_gives_every_byte_back(layout, scheme, model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q", layout=layout, scheme=scheme).path
    plain = to_plain(out, Output(path=tmp_path / "p"))
    assert is_imported(plain) and not is_imported(out) and not is_imported(tmp_path / "m")
    _same(out, from_plain(plain, Output(path=tmp_path / "r")))


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a_quantized_cache_of_another_program_is_warned_of(place, model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q", layout="modelopt").path
    config = json.loads((out / "config.json").read_text())
    if place == "config.json":
        config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    else:
        del config["quantization_config"]
        nested = json.loads((out / place).read_text())
        nested["quantization"]["kv_cache_quant_algo"] = "FP8"
        (out / place).write_text(json.dumps(nested))
    (out / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="KV cache in"):
        change_layout(out, Output(path=tmp_path / "c"), "compressed-tensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family, tmp_path):
    save_wide(family, tmp_path / "m")
    layout, scheme = ("gpt-oss", "MXFP4_RCEIL") if family == "gpt_oss" else ("modelopt", "NVFP4_TENSOR_POW2")
    out = quantized(tmp_path / "m", tmp_path / "q", layout=layout, scheme=scheme).path
    plain = to_plain(out, Output(path=tmp_path / "p", max_shard_bytes=20_000))
    _same(out, from_plain(plain, Output(path=tmp_path / "r")))


def test_experts_with_biases_come_back_from_single_experts(tmp_path):
    """gpt-oss in a layout that stores experts apart: fused for transformers, split again by the export."""
    save_wide("gpt_oss", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q").path
    plain = to_plain(out, Output(path=tmp_path / "p"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in read(plain)
    _same(out, from_plain(plain, Output(path=tmp_path / "r")))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("scheme", ["NVFP4_TENSOR_POW2", "NVFP4_COMPRESSED_TENSORS"])
def test_transformers_loads_the_exact_values(scheme, family, tmp_path):
    save_wide(family, tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme=scheme).path
    plain = to_plain(out, Output(path=tmp_path / "p"))
    loaded, info = AutoModelForCausalLM.from_pretrained(plain, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    for name, found in load_fp4(out).state.items():
        if isinstance(found, BlockTensor):
            values = dequantize(found)
            values = values.transpose(1, 2) if family == "gpt_oss" else values
            wanted = torch.bfloat16 if scheme == "NVFP4_TENSOR_POW2" else torch.float32
            assert state[name].dtype == wanted and torch.equal(state[name].float(), values), name


def test_static_inputs_survive_the_round_trip(model, tmp_path):
    statistics = statistics_of(tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", activations="static", statistics=statistics).path
    plain = to_plain(out, Output(path=tmp_path / "p"))
    back = from_plain(plain, Output(path=tmp_path / "r"))
    _same(out, back)
    assert load_fp4(back).exponents == statistics.exponents()
    other = change_layout(out, Output(path=tmp_path / "o"), "modelopt")
    assert load_fp4(other).exponents == statistics.exponents()


def test_layouts_carry_codes_and_scales_and_lead_back(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    other = change_layout(out, Output(path=tmp_path / "o"), "modelopt")
    _same(other, quantized(tmp_path / "m", tmp_path / "d", layout="modelopt").path)
    _same(out, change_layout(other, Output(path=tmp_path / "b"), "compressed-tensors"))
    ours, theirs = load_fp4(out), load_fp4(other)
    for name, found in ours.state.items():
        if isinstance(found, BlockTensor):
            assert torch.equal(found.packed, theirs.state[name].packed)
            assert torch.equal(found.block_scales, theirs.state[name].block_scales)


def test_input_scales_of_another_program_are_carried_bit_for_bit(model, tmp_path):
    """Any float32, another one for every expert: kept where it is stored alike, refused where it would be rounded."""
    statistics = statistics_of(tmp_path / "m")
    out = quantized(
        tmp_path / "m", tmp_path / "q", layout="modelopt", activations="static", statistics=statistics
    ).path
    tensors = read(out)
    odd = {n: t * (1 + torch.rand(())) if n.endswith("input_scale") else t for n, t in tensors.items()}
    rewrite(out, odd)
    (out / "tracefp4.json").unlink()
    plain = to_plain(out, Output(path=tmp_path / "p"))
    back = read(from_plain(plain, Output(path=tmp_path / "r")))
    assert back.keys() == odd.keys()
    assert all(torch.equal(back[n].view(torch.uint8), odd[n].view(torch.uint8)) for n in odd if odd[n].dim())
    assert all(torch.equal(back[n], odd[n]) for n in odd if not odd[n].dim())
    with pytest.raises(FormatError, match="multiplier cannot be stored as divisor"):
        change_layout(out, Output(path=tmp_path / "o"), "compressed-tensors")


def test_gpt_oss_and_compressed_tensors_carry_mxfp4_both_ways(tmp_path):
    save_wide("gpt_oss", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme="MXFP4_RCEIL", layout="gpt-oss").path
    other = change_layout(out, Output(path=tmp_path / "o"), "compressed-tensors")
    _same(out, change_layout(other, Output(path=tmp_path / "b"), "gpt-oss"))
    with pytest.raises(ConfigError, match="cannot hold MXFP4_RCEIL"):
        change_layout(out, Output(path=tmp_path / "x"), "modelopt")


@pytest.mark.parametrize(
    ("layout", "scheme", "other", "reason"),
    [
        ("modelopt", "NVFP4_TENSOR_FP32", "compressed-tensors", "outer scale is a multiplier"),
        ("compressed-tensors", "NVFP4_COMPRESSED_TENSORS", "modelopt", "outer scale is a divisor"),
    ],
)
def test_an_outer_scale_that_would_be_rounded_is_refused(layout, scheme, other, reason, model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q", layout=layout, scheme=scheme).path
    with pytest.raises(ConfigError, match=reason):
        change_layout(out, Output(path=tmp_path / "o"), other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"]


def test_a_foreign_checkpoint_with_powers_of_two_changes_its_layout(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    wanted = quantized(tmp_path / "m", tmp_path / "d", layout="modelopt").path
    (out / "tracefp4.json").unlink()
    other = change_layout(out, Output(path=tmp_path / "o"), "modelopt")
    assert files(other)["model.safetensors"] == files(wanted)["model.safetensors"]
    assert json.loads(files(other)["tracefp4.json"])["method"] == "carried"
    tensors = read(out)
    name = "model.layers.0.mlp.experts.0.up_proj.weight_global_scale"
    rewrite(out, {**tensors, name: tensors[name] * 1.5})
    with pytest.raises(FormatError, match="Only powers of two"):
        change_layout(out, Output(path=tmp_path / "x"), "modelopt")


def test_exp_5_changed_weights_do_not_reuse_scales(model, tmp_path):
    plain = to_plain(quantized(tmp_path / "m", tmp_path / "q").path, Output(path=tmp_path / "p"))
    tensors = read(plain)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name][3, 4] *= 1.0625
    rewrite(plain, tensors)
    with pytest.raises(
        FormatError, match=r"experts\.2\.down_proj: 1 of 1024 values are no longer .* at \[3, 4\]"
    ):
        from_plain(plain, Output(path=tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_exp_5_what_was_not_quantized_may_change(model, tmp_path):
    """A router that was trained on is no reason to refuse: it has no scales."""
    out = quantized(tmp_path / "m", tmp_path / "q").path
    plain = to_plain(out, Output(path=tmp_path / "p"))
    tensors = read(plain)
    tensors["model.layers.0.mlp.gate.weight"] += 1
    rewrite(plain, tensors)
    back = read(from_plain(plain, Output(path=tmp_path / "r")))
    assert torch.equal(back["model.layers.0.mlp.gate.weight"], tensors["model.layers.0.mlp.gate.weight"])


def test_a_sidecar_that_is_lost_or_of_another_model_is_refused(model, tmp_path):
    plain = to_plain(quantized(tmp_path / "m", tmp_path / "q").path, Output(path=tmp_path / "p"))
    sidecar = plain / "fp4_scales.safetensors"
    whole = sidecar.read_bytes()
    save_file({"model.x.block_scales": torch.zeros(1, 1, dtype=torch.uint8)}, sidecar)
    with pytest.raises(FormatError):
        from_plain(plain, Output(path=tmp_path / "r"))
    sidecar.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="truncated"):
        from_plain(plain, Output(path=tmp_path / "r"))
    sidecar.unlink()
    with pytest.raises(FormatError, match=r"lacks fp4_scales.safetensors"):
        from_plain(plain, Output(path=tmp_path / "r"))
    with pytest.raises(ConfigError, match="was not imported"):
        from_plain(tmp_path / "m", Output(path=tmp_path / "r"))


def test_codes_that_values_do_not_tell_are_refused(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    tensors = read(out)
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale"
    scales = tensors[name].view(torch.uint8).clone()
    scales[0, 0] = 0
    rewrite(out, {**tensors, name: scales.view(torch.float8_e4m3fn)})
    with pytest.raises(FormatError, match=r"up_proj: \d+ codes are lost in their values"):
        to_plain(out, Output(path=tmp_path / "p"))
    # bytes are carried as they are
    change_layout(out, Output(path=tmp_path / "o"), "modelopt")


def test_signs_of_zeros_come_back(model, tmp_path):
    tensors = read(tmp_path / "m")
    weight = tensors["model.layers.0.mlp.experts.0.up_proj.weight"]
    weight[0, :16] = -0.0
    weight[1, :16] = torch.tensor([1.0, -1e-3] * 8)
    rewrite(tmp_path / "m", tensors)
    out = quantized(tmp_path / "m", tmp_path / "q").path
    packed = read(out)["model.layers.0.mlp.experts.0.up_proj.weight_packed"]
    assert packed[0, :8].tolist() == [0x88] * 8 and packed[1, :8].tolist() == [0x87] * 8
    plain = to_plain(out, Output(path=tmp_path / "p"))
    _same(out, from_plain(plain, Output(path=tmp_path / "r")))
