"""The small engine: requests are scheduled onto pages, run, sampled, and come back with what was rounded."""

from tracefp4.rollout.completion import Completion, Engine, EngineStats, ExtendingEngine, SamplingParams
from tracefp4.rollout.engine import LocalEngine

__all__ = ["Completion", "Engine", "EngineStats", "ExtendingEngine", "LocalEngine", "SamplingParams"]
