"""The engine's forward of each supported architecture, over our ops and our pages."""

from tracefp4.models.batch import Segment, TokenBatch
from tracefp4.models.qwen3_moe import Qwen3MoeEngineModel

__all__ = ["Qwen3MoeEngineModel", "Segment", "TokenBatch"]
