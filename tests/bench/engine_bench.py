"""The suite of the engine without a GPU: the tiny shape, few steps, and results that nobody measured."""

import torch

from tracefp4.bench.engine_build import Workshop
from tracefp4.bench.engine_loads import LoadResult, Steps
from tracefp4.bench.engine_points import Load, StepBytes, loads_of
from tracefp4.bench.engine_rows import PointResult, RowMaker
from tracefp4.bench.engine_shapes import TINY
from tracefp4.bench.row import Machine

CPU = torch.device("cpu")
STEPS = Steps(timed=3, warm=2)


def workshop(shape=TINY, memory=0.9):
    return Workshop(shape=shape, device=CPU, memory=memory, page_size=16, longest=256)


def with_engine(work, plan="fp4", *, shape=TINY, routing="uniform", max_batch=8, records=True):
    """Call work with an engine of random weights; returns what it returns."""
    found = []
    workshop(shape).use(
        lambda engine: found.append(work(engine)), plan, routing=routing, max_batch=max_batch, records=records
    )
    return found[0]


def point_result(point, plan, *, step_s, num_bytes=1e9, num_pages=1024, **changes):
    """A point that was timed at the same pace everywhere."""
    loads = [
        load_result(load, step_s=step_s, num_bytes=num_bytes, **changes)
        for load in loads_of(point, num_pages=num_pages, page_size=16)
    ]
    return PointResult(
        point=point, plan=plan, digest="d", loads=tuple(loads), num_pages=num_pages, peak_share=0.88
    )


def load_result(load=None, *, step_s=0.01, num_bytes=1e9, differences=(0, 0), profile=None):
    return LoadResult(
        load=load or Load((128,) * 8, "uniform"),
        step_s=(step_s,) * 4,
        moved=StepBytes(dense=0.0, experts=num_bytes / 2, kv=num_bytes / 2),
        distinct=(8, 7),
        record_differences=differences[0],
        draw_differences=differences[1],
        graph_passes=4,
        profile=profile,
    )


def maker(shape="qwen3-30b-a3b", *, suffix="", hardware="NVIDIA H200"):
    machine = Machine(hardware=hardware, versions={}, commit="c", date="2026-01-01T00:00:00+00:00")
    return RowMaker(shape=shape, suffix=suffix, machine=machine, bytes_per_s=1e12, backend="cuda")
