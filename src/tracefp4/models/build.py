"""Which engine model computes a checkpoint: the one that knows its architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.tensor import BlockTensor
from tracefp4.models.qwen3_5_moe import Qwen35MoeEngineModel
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel


def build_engine_model(
    config: Any,
    state: Mapping[str, Tensor | BlockTensor],
    *,
    precision: Sequence[LayerPrecision],
    arithmetic: Arithmetic,
) -> Qwen3MoeEngineModel:
    """Return the engine's model of a transformers config: Qwen3-MoE, OLMoE or Qwen3.5-MoE (the text part).

    Args and raises: as `Qwen3MoeEngineModel`, which refuses every other architecture.
    """
    is_hybrid = config.model_type == "qwen3_5_moe_text"
    kind = Qwen35MoeEngineModel if is_hybrid else Qwen3MoeEngineModel
    return kind(config, state, precision=precision, arithmetic=arithmetic)
