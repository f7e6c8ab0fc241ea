"""load_fp4: the right bytes under the right names, and strict about every part of them."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from tests.checkpoints.fp4 import files, quantized, read, rewrite, save_wide, statistics_of
from tests.checkpoints.tiny_families import FAMILIES

from tracefp4.checkpoints import load_fp4
from tracefp4.checkpoints.load import shared
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import SCHEMES, BlockTensor
from tracefp4.formats.grid import decode_e4m3, encode_e4m3
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

POW2 = SCHEMES["NVFP4_TENSOR_POW2"]
FP32 = SCHEMES["NVFP4_TENSOR_FP32"]
# Half a step of a normal E4M3 number.
HALF_STEP = 1 / 16


@pytest.fixture
def model(tmp_path):
    """A tiny Qwen3 mixture, saved in tmp_path / m."""
    return save_wide("qwen3_moe", tmp_path / "m")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_bytes_are_those_of_the_model_in_memory(family, tmp_path):
    model = save_wide(family, tmp_path / "m")
    loaded = load_fp4(quantized(tmp_path / "m", tmp_path / "q").path)
    wanted = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    assert loaded.state.keys() == wanted.keys()
    experts = 0
    for name, found in loaded.state.items():
        if not isinstance(found, BlockTensor):
            assert torch.equal(found, wanted[name]), name
            continue
        experts += 1
        stored = wanted[name].transpose(1, 2) if family == "gpt_oss" else wanted[name]
        again = quantize(stored, scheme=POW2)
        assert torch.equal(found.packed, again.packed), name
        assert torch.equal(found.block_scales, again.block_scales)
        assert torch.equal(found.outer, again.outer)
    sparse = [name for name in wanted if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert experts == len(sparse) > 0
    assert (loaded.weight, loaded.activation, loaded.exponents, loaded.rescaled) == (POW2, None, {}, {})
    assert (
        "quantization_config" not in loaded.config and loaded.config["model_type"] == model.config.model_type
    )


def test_other_linears_are_matrices(model, tmp_path):
    out = quantized(
        tmp_path / "m", tmp_path / "q", include=("*.self_attn.?_proj", "*.experts.*", "lm_head")
    ).path
    loaded = load_fp4(out)
    found = loaded.state["lm_head.weight"]
    assert isinstance(found, BlockTensor) and tuple(found.shape) == (64, 32)
    again = quantize(model.lm_head.weight.detach(), scheme=POW2)
    assert torch.equal(found.packed, again.packed) and found.outer == again.outer
    assert isinstance(loaded.state["model.layers.1.self_attn.o_proj.weight"], BlockTensor)
    assert len(loaded.quantized) == 24 + 8 + 1


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_static_exponents_come_back(layout, model, tmp_path):
    statistics = statistics_of(tmp_path / "m")
    out = quantized(
        tmp_path / "m", tmp_path / "q", layout=layout, activations="static", statistics=statistics
    ).path
    loaded = load_fp4(out)
    assert loaded.activation == SCHEMES["NVFP4_STATIC_POW2"]
    assert loaded.exponents == statistics.exponents() and loaded.exponents[0] != loaded.exponents[1]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_ckp_4_sizes_add_up_and_no_key_is_missing_or_unexpected(layout, model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q", layout=layout).path
    tensors, plain = read(out), read(tmp_path / "m")
    linears = [n for n in plain if ".experts." in n]
    expected = sum(plain[n].numel() // 2 + plain[n].numel() // 16 + 4 for n in linears)
    kept = sum(t.numel() * t.itemsize for n, t in plain.items() if n not in linears)
    assert sum(t.numel() * t.itemsize for t in tensors.values()) == expected + kept
    for name in [n for n in tensors if ".experts.2." in n]:
        rewrite(out, {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(FormatError):
            load_fp4(out)
    extra = f"model.layers.0.self_attn.q_proj.{'weight_packed' if layout == 'compressed-tensors' else 'weight_scale_2'}"
    rewrite(out, {**tensors, extra: torch.zeros(4, 4)})
    with pytest.raises(FormatError, match="belongs to no quantized module"):
        load_fp4(out)
    rewrite(out, tensors)
    load_fp4(out)


@pytest.mark.parametrize("leaf", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_ckp_4_a_part_of_another_size_or_type_is_refused(leaf, model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    tensors = read(out)
    name = f"model.layers.0.mlp.experts.1.up_proj.{leaf}"
    is_scalar = leaf == "weight_global_scale"
    other_size = tensors[name].repeat(2) if is_scalar else tensors[name].t()[:-1].t().contiguous()
    for tensor in (other_size, tensors[name].view(torch.uint8).to(torch.int16)):
        rewrite(out, {**tensors, name: tensor})
        with pytest.raises(FormatError):
            load_fp4(out)


def test_ckp_4_gpt_oss_is_as_strict(tmp_path):
    save_wide("gpt_oss", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme="MXFP4_RCEIL", layout="gpt-oss").path
    tensors = read(out)
    for leaf in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_scales"):
        name = f"model.layers.1.mlp.experts.{leaf}"
        rewrite(out, {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(FormatError):
            load_fp4(out)
        rewrite(out, {**tensors, name: tensors[name][:, :-1].contiguous()})
        with pytest.raises(FormatError):
            load_fp4(out)


def test_a_scheme_that_changed_is_refused(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    text = (out / "tracefp4.json").read_text()
    (out / "tracefp4.json").write_text(text.replace(POW2.digest, "0" * 16))
    with pytest.raises(FormatError, match="NVFP4_TENSOR_POW2 has digest 0000000000000000"):
        load_fp4(out)
    (out / "tracefp4.json").write_text(text.replace('"NVFP4_TENSOR_POW2"', '"NVFP4_OF_TOMORROW"'))
    with pytest.raises(FormatError, match="no such scheme"):
        load_fp4(out)
    later = text.replace('"version": 1', '"version": 2')
    for broken, error in (("{", FormatError), ("{}", FormatError), (later, ConfigError)):
        (out / "tracefp4.json").write_text(broken)
        with pytest.raises(error):
            load_fp4(out)


def test_file_config_and_metadata_must_agree(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    stored = files(out)
    config = json.loads(stored["config.json"])
    config["quantization_config"]["ignore"].append("model.layers.0.mlp.experts.0.up_proj")
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="is packed, though the config excludes it"):
        load_fp4(out)
    (out / "config.json").write_bytes(stored["config.json"])
    metadata = json.loads(stored["tracefp4.json"])
    del metadata["modules"]["model.layers.0.mlp.experts.0.up_proj"]
    (out / "tracefp4.json").write_text(json.dumps(metadata))
    with pytest.raises(FormatError, match="lists 23 modules, 24 are packed"):
        load_fp4(out)
    config = json.loads(stored["config.json"])
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"dynamic": "local"}
    (out / "config.json").write_text(json.dumps(config))
    (out / "tracefp4.json").unlink()
    with pytest.raises(FormatError, match="has no input scale, though the config quantizes inputs"):
        load_fp4(out)


def test_a_plain_checkpoint_is_no_fp4_checkpoint(model, tmp_path):
    with pytest.raises(ConfigError, match="no FP4 checkpoint; got no quantization config"):
        load_fp4(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_bytes())
    (tmp_path / "m" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(ConfigError, match="quant_method 'awq'"):
        load_fp4(tmp_path / "m")


@pytest.mark.parametrize(
    ("layout", "scheme", "read_as"),
    [
        ("compressed-tensors", "NVFP4_COMPRESSED_TENSORS", "NVFP4_COMPRESSED_TENSORS"),
        ("modelopt", "NVFP4_MODELOPT", "NVFP4_MODELOPT"),
        ("compressed-tensors", "MXFP4_EVEN", "MXFP4_RCEIL"),
    ],
)
def test_checkpoints_of_other_programs_load_under_their_layouts_rule(
    layout, scheme, read_as, model, tmp_path
):
    out = quantized(tmp_path / "m", tmp_path / "q", layout=layout, scheme=scheme).path
    (out / "tracefp4.json").unlink()
    loaded = load_fp4(out)
    assert loaded.weight == SCHEMES[read_as]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found, wanted = loaded.state[name], dict(model.named_parameters())[name].detach()
    assert torch.equal(dequantize(found), dequantize(quantize(wanted, scheme=SCHEMES[scheme])))


def test_input_scales_that_no_power_of_two_holds_are_reported(model, tmp_path):
    out = quantized(
        tmp_path / "m",
        tmp_path / "q",
        layout="modelopt",
        activations="static",
        statistics=statistics_of(tmp_path / "m"),
    ).path
    tensors = read(out)
    odd = {n: t * 1.5 if n.endswith("input_scale") else t for n, t in tensors.items()}
    rewrite(out, odd)
    with pytest.raises(FormatError, match="Only powers of two"):
        load_fp4(out)
    (out / "tracefp4.json").unlink()
    with pytest.warns(UserWarning, match="inputs stay in high precision"):
        loaded = load_fp4(out)
    assert loaded.activation is None and loaded.exponents == {}


def _block(scale_bytes, outer, scheme=FP32):
    """One row of blocks of sixes and halves under given scale bytes."""
    codes = torch.full((1, 8 * len(scale_bytes)), 0x17, dtype=torch.uint8)
    return BlockTensor(
        packed=codes,
        block_scales=torch.tensor([scale_bytes], dtype=torch.uint8),
        outer=torch.tensor(outer, dtype=torch.int8 if scheme is POW2 else torch.float32),
        scheme=scheme,
    )


def test_shr_1_a_ratio_of_two_is_exact():
    six, twelve = _block([0x7E], 6.0 / 2688), _block([0x7E], 12.0 / 2688)
    (w1, w3), change = shared([six, twelve])
    assert w1.block_scales.item() == 0x76 and w3.block_scales.item() == 0x7E
    assert w1.outer == w3.outer == twelve.outer and torch.equal(w1.packed, six.packed)
    assert torch.equal(dequantize(w1), dequantize(six)) and torch.equal(dequantize(w3), dequantize(twelve))
    assert (change.blocks, change.inexact, change.max_relative) == (1, 0, 0.0)


def test_shr_1_a_ratio_of_0_7_is_counted_and_bounded():
    every = list(range(0x10, 0x7F))
    left, right = _block(every, 0.7), _block(every, 1.0)
    (w1, _), change = shared([left, right])
    exact = decode_e4m3(left.block_scales, torch.float64) * float(left.outer)
    relative = (decode_e4m3(w1.block_scales, torch.float64) - exact).abs() / exact
    assert float(relative.max()) == change.max_relative < HALF_STEP
    assert change.inexact == int((relative > 0).sum()) > 100


def test_shr_1_halving_is_inexact_for_odd_subnormals_alone():
    small = list(range(0x01, 0x10))
    _, change = shared([_block(small, 0.5), _block(small, 1.0)])
    assert change.inexact == 8  # 01, 03, ..., 0F
    (w1, _), same = shared([_block(small, -3, POW2), _block(small, -2, POW2)])
    assert same == change and w1.outer == -2
    everything = list(range(0x10, 0x7F))
    assert shared([_block(everything, 0.5), _block(everything, 1.0)])[1].inexact == 0


def test_shr_1_a_divisor_goes_the_other_way():
    scheme = SCHEMES["NVFP4_VLLM"]
    (w1, w3), change = shared([_block([0x7E], 448.0, scheme), _block([0x7E], 224.0, scheme)])
    assert w1.block_scales.item() == 0x76 and float(w1.outer) == float(w3.outer) == 224.0
    assert change.inexact == 0


def test_shr_1_gate_and_up_apart_are_shared_when_loaded_and_reported(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q", scheme="NVFP4_TENSOR_FP32", layout="modelopt").path
    tensors = read(out)
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"
    rewrite(out, {**tensors, name: tensors[name] * 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_fp4(out)
    assert list(loaded.rescaled) == ["model.layers.0.mlp.experts.1.gate_proj"]
    assert loaded.rescaled["model.layers.0.mlp.experts.1.gate_proj"].inexact == 0
    found = dequantize(loaded.state["model.layers.0.mlp.experts.gate_up_proj"])[1]
    wanted = dequantize(quantize(model.model.layers[0].mlp.experts.gate_up_proj.detach(), scheme=FP32))[1]
    assert torch.equal(found[:32], wanted[:32]) and torch.equal(found[32:], wanted[32:] * 2)
    rewrite(out, {**tensors, name: tensors[name] * 1.7})
    with pytest.warns(
        UserWarning, match=r"1 pairs of gate and up have two outer scales; \d+ block scales changed"
    ):
        assert load_fp4(out).rescaled["model.layers.0.mlp.experts.1.gate_proj"].inexact > 0


def test_shr_5_the_one_scale_of_a_fused_projection_is_that_of_all_its_rows(model, tmp_path):
    """q, k and v in one matrix: one scalar, read for every row; more than one number is refused."""
    out = quantized(
        tmp_path / "m",
        tmp_path / "q",
        scheme="NVFP4_TENSOR_FP32",
        layout="modelopt",
        include=("*.self_attn.[qkv]_proj",),
    ).path
    tensors = read(out)
    prefix = "model.layers.0.self_attn."
    fused = {
        n: t for n, t in tensors.items() if not n.startswith((f"{prefix}q_p", f"{prefix}k_p", f"{prefix}v_p"))
    }
    for leaf in ("weight", "weight_scale"):
        parts = [tensors[f"{prefix}{role}_proj.{leaf}"].view(torch.uint8) for role in "qkv"]
        fused[f"{prefix}qkv_proj.{leaf}"] = torch.cat(parts).view(tensors[f"{prefix}q_proj.{leaf}"].dtype)
    fused[f"{prefix}qkv_proj.weight_scale_2"] = torch.tensor(0.25)
    (out / "tracefp4.json").unlink()
    for shape in ((), (1,)):
        fused[f"{prefix}qkv_proj.weight_scale_2"] = torch.full(shape, 0.25)
        rewrite(out, fused)
        found = load_fp4(out).state[f"{prefix}qkv_proj.weight"]
        unit = replace(found, outer=torch.tensor(1.0))
        assert torch.equal(found.scales(), unit.scales() * 0.25) and found.scales().shape == (64, 2)
    fused[f"{prefix}qkv_proj.weight_scale_2"] = torch.tensor([0.25, 1e30, 1e30])
    rewrite(out, fused)
    with pytest.raises(FormatError, match=r"must be one float32; got torch.float32 \(3,\)"):
        load_fp4(out)
    for value in (0.0, float("nan"), float("inf"), -1.0):
        fused[f"{prefix}qkv_proj.weight_scale_2"] = torch.tensor(value)
        rewrite(out, fused)
        with pytest.raises(FormatError, match="positive finite"):
            load_fp4(out)


def test_dty_4_a_global_scale_in_another_type_is_refused(model, tmp_path):
    out = quantized(tmp_path / "m", tmp_path / "q").path
    tensors = read(out)
    name = "model.layers.0.mlp.experts.0.up_proj.weight_global_scale"
    rewrite(out, {**tensors, name: tensors[name].bfloat16()})
    with pytest.raises(FormatError, match=r"must be one float32; got torch.bfloat16"):
        load_fp4(out)


def test_e4m3_bytes_round_trip_what_the_rescaling_relies_on():
    every = torch.arange(0x7F, dtype=torch.uint8)
    assert torch.equal(encode_e4m3(decode_e4m3(every, torch.float64)), every)
