"""compressed-tensors, the layout of llm-compressor: `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.

    weight_packed, weight_scale, weight_global_scale float32 [1] = 1 / g, input_global_scale float32 [1] likewise

MXFP4 has neither global scale. vLLM and SGLang read it. Of routed experts, transformers 5.17 reads MXFP4; of NVFP4 it
drops the global scale, and the values are wrong by that factor.
Source: compressed-tensors 0.20, compressors/nvfp4, compressors/mxfp4 and quantization/quant_scheme.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracefp4.checkpoints.layouts.layout import Precision, Stated, kept_config
from tracefp4.checkpoints.layouts.per_module import PartNames, PerModule
from tracefp4.errors import ConfigError
from tracefp4.formats import MXFP4, NVFP4, BlockFormat

_FORMATS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
_SCALE_DTYPES = {"NVFP4": "torch.float8_e4m3fn", "MXFP4": "torch.uint8"}


class CompressedTensors(PerModule):
    """The layout."""

    name = "compressed-tensors"
    names = PartNames("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    kind = "divisor"
    scalar_shape = (1,)
    formats = (NVFP4, MXFP4)

    def config(self, precision: Precision, kept: Sequence[str]) -> dict[str, Any]:
        """One config group over all linears; `ignore` names the others."""
        block_format = precision.weight.block_format
        name = next(name for name, found in _FORMATS.items() if found is block_format)
        inputs = None
        if precision.activation is not None:
            # the outer scale is stored, block scales are found as the engine runs
            inputs = _arguments(precision.activation.block_format, dynamic="local")
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _arguments(block_format, dynamic=False),
                    "input_activations": inputs,
                    "output_activations": None,
                    "format": name,
                }
            },
            "ignore": list(kept),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def stated(self, config: Mapping[str, Any]) -> Stated | None:
        """Read `quantization_config`."""
        if config.get("quant_method") != "compressed-tensors":
            return None
        groups = config.get("config_groups")
        group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
        if not isinstance(group, Mapping):
            raise ConfigError(
                f"quantization_config has config_groups {groups!r}. One group for all quantized modules is supported. "
                "Use a checkpoint that quantizes every module alike."
            )
        name = group.get("format") or config.get("format")
        weights = group.get("weights") or {}
        if name not in _FORMATS or not weights.get("symmetric", True) or weights.get("actorder"):
            raise ConfigError(
                f"quantization_config has format {name!r}, weights {weights!r}. Supported are symmetric "
                f"{', '.join(_FORMATS)}. Use a checkpoint in one of these."
            )
        inputs = group.get("input_activations")
        has_static = inputs is not None and inputs.get("dynamic") in ("local", False)
        return Stated(
            block_format=_FORMATS[name],
            has_static_inputs=has_static,
            kept=kept_config(config, "ignore", "quantization_config"),
        )


def _arguments(block_format: BlockFormat, *, dynamic: bool | str) -> dict[str, Any]:
    """The arguments of a weight or an input, as the library writes them."""
    dtype = _SCALE_DTYPES[block_format.name]
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if block_format is NVFP4 else "group",
        "group_size": block_format.block_size,
        "symmetric": True,
        "dynamic": dynamic,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
        "scale_dtype": dtype,
        "zp_dtype": dtype,
    }
