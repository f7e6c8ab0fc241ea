"""Layouts, pinned by name, type and shape, and read by the libraries that they come from."""

import json
import warnings

import pytest
import torch
from tests.checkpoints.fp4 import files, quantized, read, save_wide, statistics_of
from tests.checkpoints.tiny_families import FAMILIES

from tracefp4.checkpoints import PackedCheckpoint
from tracefp4.checkpoints.layouts import LAYOUTS, Content
from tracefp4.errors import ConfigError
from tracefp4.formats import SCHEMES
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize

U8, F8, F32 = torch.uint8, torch.float8_e4m3fn, torch.float32
# What vLLM 0.33 looks for below every expert of a Qwen3 mixture: suffix -> (type, shape of gate [32, 32]).
DIVISOR_FAMILY = {
    "weight_packed": (U8, (32, 16)),
    "weight_scale": (F8, (32, 2)),
    "weight_global_scale": (F32, (1,)),
    "input_global_scale": (F32, (1,)),
}
MULTIPLIER_FAMILY = {
    "weight": (U8, (32, 16)),
    "weight_scale": (F8, (32, 2)),
    "weight_scale_2": (F32, ()),
    "input_scale": (F32, ()),
}
GPT_OSS = {
    "gate_up_proj_blocks": (U8, (4, 64, 1, 16)),
    "gate_up_proj_scales": (U8, (4, 64, 1)),
    "gate_up_proj_bias": (torch.bfloat16, (4, 64)),
    "down_proj_blocks": (U8, (4, 32, 1, 16)),
    "down_proj_scales": (U8, (4, 32, 1)),
    "down_proj_bias": (torch.bfloat16, (4, 32)),
}


def _peer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: run `make peers`")


def _expert_parts(tensors):
    prefix = "model.layers.1.mlp.experts.3.gate_proj."
    return {
        name.removeprefix(prefix): (tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("activations", ["w4a16", "static"])
@pytest.mark.parametrize(
    ("layout", "family"),
    [("compressed-tensors", DIVISOR_FAMILY), ("modelopt", MULTIPLIER_FAMILY)],
    ids=["divisor", "multiplier"],
)
def test_exp_3_names_types_and_shapes(layout, family, activations, tmp_path):
    save_wide("qwen3_moe", tmp_path / "m")
    found = quantized(
        tmp_path / "m",
        tmp_path / "q",
        layout=layout,
        activations=activations,
        statistics=statistics_of(tmp_path / "m") if activations == "static" else None,
    )
    inputs = ("input_global_scale", "input_scale")
    expected = {n: part for n, part in family.items() if activations == "static" or n not in inputs}
    tensors = read(found.path)
    assert _expert_parts(tensors) == expected
    modules = {
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj"
        for layer in range(2)
        for expert in range(4)
        for leaf in ("gate", "up", "down")
    }
    wanted = {f"{module}.{leaf}" for module in modules for leaf in expected}
    plain = read(tmp_path / "m")
    assert tensors.keys() == wanted | {n for n in plain if n.removesuffix(".weight") not in modules}
    for name in tensors.keys() & plain.keys() - wanted:
        assert torch.equal(tensors[name].view(U8), plain[name].view(U8)), name


def test_exp_3_names_of_gpt_oss(tmp_path):
    save_wide("gpt_oss", tmp_path / "m")
    tensors = read(quantized(tmp_path / "m", tmp_path / "q", scheme="MXFP4_RCEIL", layout="gpt-oss").path)
    prefix = "model.layers.1.mlp.experts."
    found = {n.removeprefix(prefix): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if prefix in n}
    assert found == GPT_OSS


PAIRS = [(f, layout) for f in FAMILIES for layout in LAYOUTS if layout != "gpt-oss" or f == "gpt_oss"]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_exp_1_excluded_are_exactly_the_matrices_that_are_not_packed(family, layout, tmp_path):
    save_wide(family, tmp_path / "m")
    scheme = "MXFP4_EVEN" if layout == "gpt-oss" else "NVFP4_TENSOR_POW2"
    out = quantized(tmp_path / "m", tmp_path / "q", scheme=scheme, layout=layout).path
    config = json.loads((out / "config.json").read_bytes())["quantization_config"]
    excluded = config["modules_to_not_convert" if layout == "gpt-oss" else "ignore"]
    tensors = read(out)
    plain = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.dim() == 2}
    packed = {n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")}
    stored = plain - packed
    # a tied head has no bytes of its own, and engines build the module all the same
    assert stored <= set(excluded) <= stored | {"lm_head"} and len(excluded) == len(set(excluded))
    assert packed or layout == "gpt-oss"
    routers = [name for name in stored if name.endswith((".gate", ".router"))]
    assert len(routers) == len([n for n in excluded if n.endswith((".gate", ".router"))]) >= 1
    if layout == "modelopt":
        nested = json.loads((out / "hf_quant_config.json").read_bytes())["quantization"]
        assert nested["exclude_modules"] == excluded


@pytest.mark.peers
def test_modelopt_always_states_what_vllm_asks_for(tmp_path):
    save_wide("qwen3_moe", tmp_path / "m")
    for activations, algorithm, statistics in (
        ("w4a16", "W4A16_NVFP4", None),
        ("static", "NVFP4", statistics_of(tmp_path / "m")),
    ):
        out = quantized(
            tmp_path / "m",
            tmp_path / algorithm,
            layout="modelopt",
            activations=activations,
            statistics=statistics,
        ).path
        stated = json.loads((out / "hf_quant_config.json").read_bytes())
        assert stated["quantization"].keys() == {
            "quant_algo",
            "kv_cache_quant_algo",
            "group_size",
            "exclude_modules",
        }
        assert (
            stated["quantization"]["quant_algo"] == algorithm and stated["quantization"]["group_size"] == 16
        )
        config = json.loads((out / "config.json").read_bytes())["quantization_config"]
        convert = _peer("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
        assert config == convert(stated)


@pytest.mark.parametrize(
    ("scheme", "activations", "preset"),
    [
        ("NVFP4_TENSOR_POW2", "w4a16", "NVFP4A16"),
        ("NVFP4_TENSOR_POW2", "static", "NVFP4"),
        ("MXFP4_EVEN", "w4a16", "MXFP4A16"),
    ],
)
@pytest.mark.peers
def test_compressed_tensors_accepts_the_config_as_its_preset(scheme, activations, preset, tmp_path):
    package = _peer("compressed_tensors.quantization")
    save_wide("qwen3_moe", tmp_path / "m")
    out = quantized(
        tmp_path / "m",
        tmp_path / "q",
        scheme=scheme,
        activations=activations,
        statistics=statistics_of(tmp_path / "m") if activations == "static" else None,
    ).path
    config = json.loads((out / "config.json").read_bytes())["quantization_config"]
    parsed = package.QuantizationConfig.model_validate(config)
    wanted = package.preset_name_to_scheme(preset, ["Linear"])
    found = parsed.config_groups["group_0"]
    for side in ("weights", "input_activations"):
        ours, theirs = getattr(found, side), getattr(wanted, side)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # who observes during a calibration says nothing about what is stored
            hidden = {"observer", "observer_kwargs"}
            assert ours.model_dump(exclude=hidden) == theirs.model_dump(exclude=hidden)


def _decoded(out):
    """Our own values of every quantized module."""
    with PackedCheckpoint(out) as packed:
        return {linear.module: dequantize(packed.read_block(linear)) for linear in packed.linears}


@pytest.mark.parametrize(
    "scheme",
    [
        "NVFP4_TENSOR_POW2",
        "NVFP4_TENSOR_POW2_4OVER6_MSE",
        "NVFP4_COMPRESSED_TENSORS",
        "NVFP4_VLLM",
        "MXFP4_EVEN",
    ],
)
@pytest.mark.peers
def test_compressed_tensors_unpacks_the_same_values(scheme, tmp_path):
    compressors = _peer("compressed_tensors.compressors.nvfp4.base")
    compressor = compressors.NVFP4PackedCompressor
    preset = "NVFP4A16"
    if scheme.startswith("MXFP4"):
        compressor = _peer("compressed_tensors.compressors.mxfp4.base").MXFP4PackedCompressor
        preset = "MXFP4A16"
    arguments = _peer("compressed_tensors.quantization").preset_name_to_scheme(preset, ["Linear"])
    save_wide("qwen3_moe", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme=scheme).path
    tensors, ours = read(out), _decoded(out)
    assert len(ours) == 24
    for module, value in ours.items():
        prefix = f"{module}."
        parts = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        theirs = compressor.decompress(parts, arguments)["weight"]
        if SCHEMES[scheme].is_exact_in_bf16:
            assert torch.equal(theirs.float(), value), module
        else:
            # the library decodes in bf16 when it decompresses; ours is rounded as it rounds
            unpacked = compressors.unpack_fp4_from_uint8(parts["weight_packed"], *value.shape, dtype=F32)
            scales = parts["weight_scale"].float() / parts["weight_global_scale"]
            assert torch.equal(unpacked * scales.repeat_interleave(16, 1), value), module


@pytest.mark.parametrize(
    "scheme", ["NVFP4_TENSOR_POW2", "NVFP4_TENSOR_FP32", "NVFP4_MODELOPT", "NVFP4_TENSOR_FP32_4OVER6_MSE"]
)
@pytest.mark.peers
def test_modelopt_unpacks_the_same_values(scheme, tmp_path):
    library = _peer("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    save_wide("qwen3_moe", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme=scheme, layout="modelopt").path
    tensors, ours = read(out), _decoded(out)
    assert len(ours) == 24
    for module, value in ours.items():
        packed = tensors[f"{module}.weight"]
        theirs = library(value.shape, F32, packed).dequantize(
            F32,
            scale=tensors[f"{module}.weight_scale"],
            double_scale=tensors[f"{module}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        assert torch.equal(theirs, value), module


@pytest.mark.parametrize("scheme", ["MXFP4_RCEIL", "MXFP4_EVEN", "MXFP4_FLOOR"])
def test_transformers_unpacks_gpt_oss_to_the_same_values(scheme, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = save_wide("gpt_oss", tmp_path / "m")
    tensors = read(quantized(tmp_path / "m", tmp_path / "q", scheme=scheme, layout="gpt-oss").path)
    for leaf in ("gate_up_proj", "down_proj"):
        prefix = f"model.layers.0.mlp.experts.{leaf}"
        theirs = convert_moe_packed_tensors(tensors[f"{prefix}_blocks"], tensors[f"{prefix}_scales"])
        stored = dict(model.named_parameters())[prefix].detach()
        ours = dequantize(quantize(stored.transpose(1, 2), scheme=SCHEMES[scheme]), dtype=torch.bfloat16)
        assert torch.equal(theirs, ours.transpose(1, 2))


def test_transformers_loads_a_gpt_oss_export_by_itself(tmp_path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = save_wide("gpt_oss", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme="MXFP4_RCEIL", layout="gpt-oss").path
    loaded, info = AutoModelForCausalLM.from_pretrained(
        out, quantization_config=Mxfp4Config(dequantize=True), output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    original = dict(model.named_parameters())
    for name, value in loaded.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            wanted = quantize(original[name].detach().transpose(1, 2), scheme=SCHEMES["MXFP4_RCEIL"])
            assert torch.equal(value.float(), dequantize(wanted).transpose(1, 2)), name
        else:
            assert torch.equal(value.float(), original[name].float()), name


@pytest.mark.parametrize(("scheme", "is_whole"), [("MXFP4_EVEN", True), ("NVFP4_TENSOR_POW2", False)])
@pytest.mark.peers
def test_of_fused_experts_transformers_reads_mxfp4_and_drops_the_outer_scale_of_nvfp4(
    scheme, is_whole, tmp_path
):
    """What the help of `quantize` says of transformers; it reads the outer scale once this fails."""
    from transformers import AutoModelForCausalLM

    _peer("compressed_tensors")
    save_wide("qwen3_moe", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme=scheme).path
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    lost = [name for name in info["unexpected_keys"] if name.endswith(".weight_global_scale")]
    assert len(lost) == len(info["unexpected_keys"]) == (0 if is_whole else 24)
    module = "model.layers.1.mlp.experts.0.down_proj"
    theirs = dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"][0].float()
    wanted = _decoded(out)[module]
    assert torch.equal(theirs, wanted if is_whole else wanted * read(out)[f"{module}.weight_global_scale"])


def _parts(layout, block, **options):
    """The tensors of one linear [out, in] in a layout, by last name."""
    from tracefp4.checkpoints import Cut, Group, Linear

    linear = Linear(
        module="m",
        stored="m.weight",
        cut=Cut(),
        kind="mlp",
        layer=0,
        expert=None,
        role="",
        shape=tuple(block.shape),
    )
    content = Content(blocks=(block,), **options)
    return {p.name.removeprefix("m."): p.tensor for p in LAYOUTS[layout].parts(Group((linear,)), content)}


def test_dty_4_the_outer_scale_is_float32():
    weight = torch.randn(16, 32).clamp(-4, 4)
    weight[3, 5] = 5.0
    parts = _parts("modelopt", quantize(weight.bfloat16(), scheme=SCHEMES["NVFP4_TENSOR_FP32"]))
    assert parts["weight_scale_2"].dtype == torch.float32
    assert (
        float(parts["weight_scale_2"])
        == float(torch.tensor(5.0) / torch.tensor(2688.0))
        == 0.0018601190531626344
    )
    divisor = _parts("compressed-tensors", quantize(weight.bfloat16(), scheme=SCHEMES["NVFP4_VLLM"]))
    assert divisor["weight_global_scale"].dtype == torch.float32
    assert abs(float(divisor["weight_global_scale"]) * 5.0 / 2688.0 - 1.0) < 2.0**-23


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_zer_1_a_block_of_zeros_is_no_nan_in_the_file(layout):
    weight = torch.zeros(1, 32)
    weight[0, 16:19] = torch.tensor([3.0, 1.0, 0.5])
    for scheme in (
        "NVFP4_TENSOR_POW2",
        {"modelopt": "NVFP4_TENSOR_FP32"}.get(layout, "NVFP4_COMPRESSED_TENSORS"),
    ):
        block = quantize(weight, scheme=SCHEMES[scheme])
        parts = _parts(layout, block)
        stored = parts["weight_scale"].view(U8)
        assert not torch.isin(stored, torch.tensor([0x7F, 0xFF], dtype=U8)).any()
        assert torch.equal(dequantize(block), weight)
        packed = parts["weight_packed" if layout == "compressed-tensors" else "weight"]
        assert packed[0, :8].tolist() == [0] * 8
        if scheme == "NVFP4_TENSOR_FP32":
            assert int(stored[0, 1]) == 0x7E and packed[0, 8:10].tolist() == [7 | 4 << 4, 2]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_lay_6_block_scales_are_a_matrix_in_row_order(layout):
    weight = torch.randn(128, 64)
    block = quantize(weight, scheme=SCHEMES["NVFP4_TENSOR_POW2"])
    stored = _parts(layout, block)["weight_scale"]
    assert stored.dtype == torch.float8_e4m3fn and tuple(stored.shape) == (128, 4)
    wanted = torch.stack(
        [
            quantize(weight[:, g * 16 : g * 16 + 16], scheme=SCHEMES["NVFP4_ROW_POW2"]).scales()[:, 0]
            for g in range(4)
        ],
        dim=1,
    )
    # the same scales up to the power of two that is stored apart
    powers = stored.float() * 2.0 ** block.outer.float() / wanted
    assert bool((powers > 0.9).all()) and bool((powers < 1.1).all())


@pytest.mark.parametrize(
    ("layout", "scheme", "reason"),
    [
        ("compressed-tensors", "NVFP4_ROW_POW2", "outer scale: row"),
        ("compressed-tensors", "NVFP4_TENSOR_FP32", "outer scale is a multiplier"),
        ("compressed-tensors", "NVFP4_FOUROVERSIX", "outer scale is a amax"),
        ("modelopt", "NVFP4_COMPRESSED_TENSORS", "outer scale is a divisor"),
        ("modelopt", "MXFP4_EVEN", "Use compressed-tensors or gpt-oss"),
        ("modelopt", "NVFP4_STATIC_POW2", "outer scale: static"),
        ("gpt-oss", "NVFP4_TENSOR_POW2", "Use an MXFP4 scheme"),
        ("gpt-oss", "MXFP4_EVEN", "the family qwen3_moe"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_with_the_reason(layout, scheme, reason, tmp_path):
    save_wide("qwen3_moe", tmp_path / "m")
    with pytest.raises(ConfigError, match=reason):
        quantized(tmp_path / "m", tmp_path / "q", scheme=scheme, layout=layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_static_inputs_beside_mxfp4_are_refused(tmp_path):
    save_wide("qwen3_moe", tmp_path / "m")
    with pytest.raises(ConfigError, match="static NVFP4 inputs beside NVFP4 weights"):
        quantized(
            tmp_path / "m",
            tmp_path / "q",
            scheme="MXFP4_EVEN",
            activations="static",
            statistics=statistics_of(tmp_path / "m"),
        )


def test_static_input_scales_are_the_calibrated_powers_in_both_directions(tmp_path):
    save_wide("qwen3_moe", tmp_path / "m")
    statistics = statistics_of(tmp_path / "m")
    exponents = statistics.exponents()
    for layout, leaf, sign in (
        ("compressed-tensors", "input_global_scale", -1),
        ("modelopt", "input_scale", 1),
    ):
        tensors = read(
            quantized(
                tmp_path / "m", tmp_path / layout, layout=layout, activations="static", statistics=statistics
            ).path
        )
        for layer in range(2):
            for role, k in zip(
                ("gate", "up", "down"), (*exponents[layer][:1] * 2, exponents[layer][1]), strict=True
            ):
                name = f"model.layers.{layer}.mlp.experts.2.{role}_proj.{leaf}"
                assert float(tensors[name]) == 2.0 ** (sign * k)


def test_a_router_of_another_class_is_named_too(tmp_path):
    """gpt-oss has a router that is no nn.Linear; it is listed all the same."""
    save_wide("gpt_oss", tmp_path / "m")
    out = quantized(tmp_path / "m", tmp_path / "q", scheme="MXFP4_RCEIL", layout="gpt-oss").path
    config = json.loads(files(out)["config.json"])["quantization_config"]
    assert {f"model.layers.{layer}.mlp.router" for layer in range(2)} <= set(config["modules_to_not_convert"])
