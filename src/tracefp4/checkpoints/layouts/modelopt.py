"""ModelOpt: the layout of nvidia-modelopt's export, quant_algo `NVFP4` or, for weights alone, `W4A16_NVFP4`.

    weight uint8, weight_scale, weight_scale_2 float32 () = g, input_scale float32 () likewise

The settings stand twice: in hf_quant_config.json, and in config.json under other keys, as the library writes them.
vLLM, SGLang and TensorRT-LLM read it.
Source: nvidia-modelopt 0.47, export/convert_hf_config.py and export/unified_export_hf.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tracefp4.checkpoints.layouts.layout import Precision, Stated, kept_config
from tracefp4.checkpoints.layouts.per_module import PartNames, PerModule
from tracefp4.errors import ConfigError
from tracefp4.formats import NVFP4
from tracefp4.version import VERSION

HF_QUANT_CONFIG = "hf_quant_config.json"


class ModelOpt(PerModule):
    """The layout."""

    name = "modelopt"
    names = PartNames("weight", "weight_scale", "weight_scale_2", "input_scale")
    kind = "multiplier"
    scalar_shape = ()
    formats = (NVFP4,)

    def config(self, precision: Precision, kept: Sequence[str]) -> dict[str, Any]:
        """The form of config.json."""
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        inputs = {} if precision.activation is None else {"input_activations": dict(weights)}
        return {
            "config_groups": {"group_0": {**inputs, "weights": weights, "targets": ["Linear"]}},
            "ignore": list(kept),
            "quant_algo": _algorithm(precision),
            "producer": _producer(),
            "quant_method": "modelopt",
        }

    def files(self, precision: Precision, kept: Sequence[str]) -> dict[str, bytes]:
        """hf_quant_config.json, with the three keys without which vLLM refuses it."""
        content = {
            "producer": _producer(),
            "quantization": {
                "quant_algo": _algorithm(precision),
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": list(kept),
            },
        }
        return {HF_QUANT_CONFIG: (json.dumps(content, indent=2) + "\n").encode()}

    def stated(self, config: Mapping[str, Any]) -> Stated | None:
        """Read either form of the settings."""
        inner = config.get("quantization")
        if config.get("quant_method") != "modelopt" and not isinstance(inner, Mapping):
            return None
        is_nested = isinstance(inner, Mapping)
        settings = inner if isinstance(inner, Mapping) else config
        algorithm = settings.get("quant_algo")
        if algorithm not in ("NVFP4", "W4A16_NVFP4") or settings.get("group_size", 16) != 16:
            raise ConfigError(
                f"The quantization config has quant_algo {algorithm!r}, group_size {settings.get('group_size', 16)!r}. "
                "Supported are NVFP4 and W4A16_NVFP4 in groups of 16. Use a checkpoint in one of these."
            )
        key = "exclude_modules" if is_nested else "ignore"
        return Stated(
            block_format=NVFP4,
            has_static_inputs=algorithm == "NVFP4",
            kept=kept_config(settings, key, "quantization config"),
        )


def _algorithm(precision: Precision) -> str:
    return "W4A16_NVFP4" if precision.activation is None else "NVFP4"


def _producer() -> dict[str, str]:
    return {"name": "tracefp4", "version": VERSION}
