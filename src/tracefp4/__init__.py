"""FP4 rollouts for RL of mixture-of-experts models, with a trainer that follows what the rollout rounded to.

The public names below are imported on first use, so `import tracefp4` costs nothing and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracefp4.version import VERSION

__version__ = VERSION

_HOMES = {
    "BlockTensor": "tracefp4.formats",
    "NVFP4_KV": "tracefp4.formats",
    "NVFP4_ROW_POW2": "tracefp4.formats",
    "NVFP4_TENSOR_POW2": "tracefp4.formats",
    "quantize": "tracefp4.ops.quantize",
    "dequantize": "tracefp4.ops.dequantize",
    "Record": "tracefp4.guidance",
    "ReplayBatch": "tracefp4.guidance",
    "record": "tracefp4.guidance.session",
    "replay": "tracefp4.guidance.session",
    "PlanRules": "tracefp4.patching",
    "plan": "tracefp4.patching",
    "apply": "tracefp4.patching",
    "LocalEngine": "tracefp4.rollout",
    "SamplingParams": "tracefp4.rollout",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from tracefp4.formats import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, BlockTensor
    from tracefp4.guidance import Record, ReplayBatch
    from tracefp4.guidance.session import record, replay
    from tracefp4.ops.dequantize import dequantize
    from tracefp4.ops.quantize import quantize
    from tracefp4.patching import PlanRules, apply, plan
    from tracefp4.rollout import LocalEngine, SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"tracefp4 has no public name {name!r}; it has: {', '.join(sorted(_HOMES))}")
    return getattr(import_module(_HOMES[name]), name)
