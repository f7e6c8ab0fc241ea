"""Engines in bf16 storage whose decode passes are "captured" without a GPU: the body is run again at every step and its
results are put where those of the first run are, as a graph does."""

from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine

from tracefp4.formats.arithmetic import NATIVE
from tracefp4.rollout.graphs import DecodeGraphs
from tracefp4.rollout.ring import tensors_of


class Captures:
    """Stands in for `cuda_capture`, and counts."""

    def __init__(self):
        self.num_captured = 0
        self.num_repeats = 0

    def __call__(self, body):
        self.num_captured += 1
        body()
        outputs = body()

        def repeat():
            self.num_repeats += 1
            found = body()
            outputs.drawn.copy_(found.drawn)
            if outputs.taps is not None:
                for kept, part in zip(tensors_of(outputs.taps), tensors_of(found.taps), strict=True):
                    kept.copy_(part)

        return repeat, outputs


def native_engine(model=None, **changes):
    """An engine in bf16 storage that runs every pass eagerly."""
    return make_engine(tiny_model() if model is None else model, arithmetic=NATIVE, **changes)


def captured_engine(model=None, **changes):
    """The same with captured decode passes; also returns what counts captures."""
    engine, captures = native_engine(model, **changes), Captures()
    graphs = DecodeGraphs(
        engine._model, engine.pool, engine._scheduler.rows, engine._recorder, capture=captures
    )
    engine._graphs = engine._runner._graphs = graphs
    return engine, captures
