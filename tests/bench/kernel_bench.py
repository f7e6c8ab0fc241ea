"""The suite of kernels without a GPU: small shapes, the reference as contender, and a timer that only counts."""

import importlib
import sys

import torch

from tracefp4.bench.kernel_jobs import Bench, KernelSizes
from tracefp4.bench.kernels import Suite
from tracefp4.bench.replay import Captured, tensors_of
from tracefp4.bench.row import Machine
from tracefp4.ops.backend import IMPLEMENTED, Backend
from tracefp4.ops.device import KernelFile
from tracefp4.patching.shapes import ModelShape

TINY = ModelShape(
    name="tiny", hidden=64, layers=2, attention_layers=(0, 1), q_heads=4, kv_heads=2, head_dim=64, experts=4, top_k=2,
    moe_inter=32, vocab=300, delta_qk_heads=1, delta_v_heads=2, delta_dim=64,
)  # fmt: skip
SIZES = KernelSizes(
    rows=8, width=64, small_rows=4, matmul=16, grouped_tokens=(8,), models={"tiny": TINY}, expert_tokens=(1, 20),
    zipf_tokens=(20,), attention=(("tiny", 2, 256),), page_size=32, batch=16, sample_model="tiny", refit_model="tiny",
)  # fmt: skip


class CountingTimer:
    """Runs calls at once; a replay runs them again into the results that were captured. Times are those given."""

    def __init__(self, seconds=lambda: 1.0):
        self.seconds_of_a_replay = seconds
        self.replays = []

    def capture(self, calls, repeats):
        outputs = [call() for call in calls]
        number = len({id(replay) for replay in self.replays})

        def replay():
            self.replays.append(number)
            for call, output in zip(calls, outputs, strict=True):
                for to, of in zip(tensors_of(output), tensors_of(call()), strict=True):
                    if to is not of:
                        to.detach().copy_(of.detach())

        return Captured(replay, outputs)

    def seconds(self, replay):
        replay()
        return self.seconds_of_a_replay()


def suite(timer=None, on_event=lambda text: None, hardware="a machine"):
    machine = Machine(
        hardware=hardware, versions={"torch": "1"}, commit="c", date="2026-01-01T00:00:00+00:00"
    )
    bench = Bench(device=torch.device("cpu"), cache_bytes=0, sizes=SIZES, backend=Backend.REFERENCE)
    return Suite(
        bench=bench, timer=timer or CountingTimer(), machine=machine, on_event=on_event, num_replays=2
    )


def device_libraries():
    """Return every library of GPU kernels, wherever in an op it is declared."""
    found = []
    for op, backends in IMPLEMENTED.items():
        if Backend.CUDA in backends:
            importlib.import_module(f"tracefp4.ops.{op}.device")
            modules = [m for name, m in sys.modules.items() if name.startswith(f"tracefp4.ops.{op}.")]
            found += [v for m in modules for v in vars(m).values() if isinstance(v, KernelFile)]
    return found
