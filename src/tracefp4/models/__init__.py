"""The engine's forward of each supported architecture, over our ops and our pages."""

from tracefp4.models.batch import Segment, TokenBatch
from tracefp4.models.build import build_engine_model
from tracefp4.models.qwen3_5_moe import Qwen35MoeEngineModel
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel

__all__ = ["Qwen3MoeEngineModel", "Qwen35MoeEngineModel", "Segment", "TokenBatch", "build_engine_model"]
