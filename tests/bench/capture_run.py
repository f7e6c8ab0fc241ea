"""Runs what `bench kernels` measures on a device that is not there, refusing whatever a graph cannot capture."""

import json
import sys

import torch
from tests.bench.kernel_bench import SIZES, device_libraries
from tests.bench.pretend_device import OnDevice, install, pretend_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracefp4.bench.kernel_jobs import Bench
from tracefp4.bench.kernels import all_cases
from tracefp4.ops import backend
from tracefp4.ops.backend import IMPLEMENTED, Backend
from tracefp4.ops.kernels import Status

# results whose size the host must learn
SIZED_BY_VALUES = (
    "aten::nonzero",
    "aten::_unique2",
    "aten::masked_select",
    "aten::bincount",
    "aten::unique_dim",
)


class Capturing(TorchDispatchMode):
    """Raises where a stream that is being captured would."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_read = name == "aten::_local_scalar_dense" and isinstance(args[0], OnDevice)
        if is_read or (name in SIZED_BY_VALUES and any(isinstance(x, OnDevice) for x in tensors)):
            raise RuntimeError(f"{name} makes the host wait for the device")
        result = func(*args, **kwargs)
        if name in ("aten::copy_", "aten::_to_copy") and isinstance(result, OnDevice) != isinstance(
            args[1] if name == "aten::copy_" else args[0], OnDevice
        ):
            raise RuntimeError(f"{name} between host and device")
        return result


class NoKernels:
    """A GPU that does nothing, and counts."""

    launches = 0

    def run(self, program, launch, arguments, device):
        assert device.type != "cpu"
        self.launches += 1


def use(runner):
    """Let every op run its kernels on the pretended device."""
    for library in device_libraries():
        library.runner = runner
    backend._status = lambda op, asked, device, case=None: Status(
        asked is Backend.REFERENCE or torch.device(device).type != "cpu", "pretended"
    )


def main():
    install()
    runner, captured = NoKernels(), {}
    use(runner)
    Bench.generator = lambda self, seed: torch.Generator("cpu").manual_seed(seed)
    torch.compile = lambda call, **options: call
    with pretend_device() as device:
        bench = Bench(device=device, cache_bytes=0, sizes=SIZES)
        for case in all_cases(SIZES):
            if case.op and Backend.CUDA not in IMPLEMENTED[case.op]:
                continue
            job, before = case.build(bench), runner.launches
            for name, contender in {"ours": job.ours, **job.theirs}.items():
                contender.calls[0]()  # tables are copied once, before a graph is captured
                try:
                    with Capturing():
                        for call in contender.calls:
                            call()
                except RuntimeError as problem:
                    raise RuntimeError(f"{case.id}, {name}: {problem}") from problem
            captured[case.id] = runner.launches - before
    sys.stdout.write(json.dumps(captured) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
