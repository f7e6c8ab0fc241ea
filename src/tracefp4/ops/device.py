"""Kernels of one op on NVIDIA GPUs: compiled at first use, compared with the reference, launched on torch's stream.

Every op says what its kernels are specialised for: a case, such as a scheme and a dtype. A case is compiled and
compared when it is first asked for, and no other is; a GPU loads kernels in such a comparison only, so nothing runs
that was not compared. A launch asks nothing of the host but its arguments, so it can be captured in a CUDA graph.
Arguments are tensors (by address), None (a null pointer), int (32 bits) and float (32 bits). The `Runner` is the GPU;
tests put an emulation in its place.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tracefp4.errors import BackendError
from tracefp4.ops import nvrtc
from tracefp4.ops.kernels import Status
from tracefp4.ops.launching import Value, start

_LOG = logging.getLogger(__name__)
Argument = Tensor | int | float | None
Case = TypeVar("Case", bound=Hashable)
"""What the kernels of an op are specialised for; it decides every variant that a call launches."""


class Launch(NamedTuple):
    """What runs, and how often."""

    kernel: str
    """Name of the kernel in the file."""
    grid: tuple[int, ...]
    """Blocks along x, y, z; one to three numbers."""
    threads: int
    """Threads of a block, a multiple of 32."""
    defines: Mapping[str, int | str]
    """Constants of the variant."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""


class Program(NamedTuple):
    """A file of kernels."""

    source: Path
    """The .cu file."""
    contracts: bool
    """Whether a * b + c may be rounded once."""


class Runner(Protocol):
    """Where kernels run."""

    def run(
        self, program: Program, launch: Launch, arguments: tuple[Argument, ...], device: torch.device
    ) -> None:
        """Run one kernel on the current stream of a device, without waiting."""


class KernelFile:
    """The kernels in one .cu file."""

    def __init__(self, source: Path, *, contracts: bool = False) -> None:
        """Declare a file; nothing is compiled before `launch`.

        Args:
            source: The .cu file.
            contracts: Allow fused multiply-adds; only where no byte depends on it.
        """
        self.program = Program(source, contracts)
        self.runner: Runner = GPU

    def launch(self, launch: Launch, *arguments: Argument, device: torch.device) -> None:
        """Run a kernel; a grid with an empty dimension runs nothing.

        Raises:
            BackendError: The variant was not compared with the reference or does not compile, or the GPU refuses the
                launch.
        """
        if 0 in launch.grid:
            return
        self.runner.run(self.program, launch, arguments, device)


class DeviceLibrary(KernelFile, Generic[Case]):
    """The main file of an op, and the comparison of all its kernels with the reference."""

    def __init__(
        self,
        source: Path,
        check: Callable[[torch.device, Case], str | None],
        usual: Case,
        *,
        contracts: bool = False,
        scope: str = "",
    ) -> None:
        """Declare a library; nothing is compiled before `status` or `launch`.

        Args:
            source: The .cu file.
            check: Compares a few small calls of a case on a device with the reference; launches every variant that
                calls of the case launch, and returns what differs, or None.
            usual: The case that answers for the op where no operands are at hand.
            contracts: Allow fused multiply-adds; only where no byte depends on it.
            scope: Which operands the kernels take, where that is not all that the op takes; AUTO leaves the rest to
                the reference.
        """
        super().__init__(source, contracts=contracts)
        self._scope = f"; for {scope}" if scope else ""
        self._check, self._usual = check, usual
        self._status: dict[tuple[torch.device, Case], Status] = {}

    def status(self, device: torch.device, case: Case | None = None) -> Status:
        """Say whether the kernels of a case run on a device; the first call compiles and compares, once per process.

        Args:
            device: The GPU.
            case: What the operands need; None for the op's usual case.

        Raises:
            BackendError: The case was not compared yet, and the current stream is being captured: a comparison reads
                results back, which a graph cannot hold.
        """
        key = (device, self._usual if case is None else case)
        status = self._status.get(key)
        if status is None:
            status = self._status[key] = self._compare(*key)
        return status

    def _compare(self, device: torch.device, case: Case) -> Status:
        if not torch.cuda.is_available():
            return Status(False, "this torch sees no NVIDIA GPU.")
        is_installed, reason = nvrtc.is_installed()
        if not is_installed:
            return Status(False, reason)
        what = f"{self.program.source.parent.name} for {case}"
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                f"kernels are compared with the reference at their first use, which a CUDA graph cannot capture; got "
                f"{what} for the first time during capture. Captured are calls of cases seen before. Make the same "
                "call once before the capture."
            )
        made_by, begun = f"{reason} for {architecture_of(device)}", time.perf_counter()
        try:
            # autocast of the caller would round the reference's products
            with comparing(), torch.no_grad(), torch.autocast("cuda", enabled=False):
                difference = self._check(device, case)
            problem = None if difference is None else f"{difference} differ from the reference"
        except BackendError as refusal:
            problem = str(refusal)
        except Exception as failure:  # whatever the GPU or its binding says: the reference must still run
            problem = f"its check ended in {type(failure).__name__}: {failure}"
        if problem is None:
            took_s = time.perf_counter() - begun
            return Status(True, f"{made_by}, ready after {took_s:.1f} s{self._scope}")
        _LOG.warning("the kernels of %s are not used: %s", what, problem)
        return Status(False, f"{made_by}, refused: {problem}.")


_is_comparing: ContextVar[bool] = ContextVar("_is_comparing", default=False)


@contextmanager
def comparing() -> Iterator[None]:
    """Let kernels load on a GPU that were not compared with the reference yet: the caller compares what they give."""
    token = _is_comparing.set(True)
    try:
        yield
    finally:
        _is_comparing.reset(token)


def architecture_of(device: torch.device) -> str:
    """Return the architecture that code for a GPU is compiled for, with its own instructions where it has some."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def aligned(x: Tensor) -> Tensor:
    """Return x contiguous and at an address that 16-byte loads may use."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def heads_in_place(x: Tensor) -> Tensor:
    """Return heads [T, H, D] that lie side by side in a token, at addresses for 16-byte loads; tokens may lie apart, by
    a multiple of 16 values, as in the output of one projection for queries, keys and values."""
    x = x.detach().resolve_neg()
    is_side_by_side = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 16 == 0 and x.stride(0) < 2**31
    return x if is_side_by_side and x.data_ptr() % 16 == 0 else aligned(x)


def packed_arguments(arguments: tuple[Argument, ...]) -> list[Value]:
    """Return arguments as a kernel reads them: addresses, int32 and float32.

    Raises:
        OverflowError: An int does not fit.
    """
    packed: list[Value] = []
    for argument in arguments:
        if argument is None:
            packed.append(ctypes.c_void_p(0))
        elif isinstance(argument, Tensor):
            packed.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, float):
            packed.append(ctypes.c_float(argument))
        else:
            if not -(2**31) <= argument < 2**31:
                raise OverflowError(f"a kernel takes 32-bit integers; got {argument}")
            packed.append(ctypes.c_int32(argument))
    return packed


@dataclass(slots=True)
class _Loaded:
    """A kernel on a GPU."""

    kernel: Any
    """What the binding launches."""
    shared_bytes: int
    """Dynamic shared memory that it may use."""


class _GPU:
    """Launches on the current stream of torch."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Any, ...], _Loaded] = {}

    def run(
        self, program: Program, launch: Launch, arguments: tuple[Argument, ...], device: torch.device
    ) -> None:
        key = (program, launch.kernel, device, *launch.defines.items())
        with torch.cuda.device(device):
            loaded = self._kernels.get(key)
            if loaded is None:
                loaded = self._kernels[key] = _load(program, launch, device)
            if launch.shared_bytes > loaded.shared_bytes:
                _raise_shared(loaded.kernel, launch.shared_bytes, device)
                loaded.shared_bytes = launch.shared_bytes
            how = (torch.cuda.current_stream(device).cuda_stream, _can_start_early(device))
            values = packed_arguments(arguments)
            try:
                start(loaded.kernel.handle, launch.grid, (launch.threads, launch.shared_bytes), values, how)
            except Exception as problem:  # the binding has classes of its own for what the driver says
                raise BackendError(
                    f"the GPU refuses {launch.kernel} of {_name(program)}, or an earlier kernel failed; got "
                    f"{type(problem).__name__}: {problem}, for a grid of {launch.grid} with {launch.threads} threads "
                    f"and {launch.shared_bytes} bytes of shared memory. A grid has at most 2,147,483,647 x 65,535 x "
                    "65,535 blocks. Pass fewer rows at a time, or Backend.REFERENCE."
                ) from problem


@lru_cache(maxsize=64)
def _can_start_early(device: torch.device) -> bool:
    """Whether a kernel may lie on the multiprocessors before the one ahead of it in the stream has ended.

    That hides the time of a launch. The kernel awaits the end itself (`await_earlier` of device.cuh).
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)


_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel may use without being told that it may."""


def _name(program: Program) -> str:
    return f"{program.source.parent.name}/{program.source.name}"


def _load(program: Program, launch: Launch, device: torch.device) -> _Loaded:
    from cuda.core import Device, ObjectCode

    if not _is_comparing.get():
        raise BackendError(
            f"kernels run on a GPU once they were compared with the reference; got {launch.kernel} of {_name(program)} "
            f"with {dict(launch.defines)}, which no comparison has launched. The check of its op covers every variant "
            "that the op launches. Report this, and pass Backend.REFERENCE."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    Device(index).set_current()
    built = nvrtc.build(
        program.source,
        defines=launch.defines,
        architecture=architecture_of(device),
        contracts=program.contracts,
    )
    return _Loaded(ObjectCode.from_cubin(built.code).get_kernel(launch.kernel), _SHARED_BYTES)


def _raise_shared(kernel: Any, num_bytes: int, device: torch.device) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    (error,) = driver.cuKernelSetAttribute(attribute, num_bytes, kernel.handle, index)
    if int(error) != 0:
        raise BackendError(
            f"a kernel asks for {num_bytes} bytes of shared memory; {torch.cuda.get_device_name(device)} refuses "
            f"({error.name}). GPUs of sm_90 have 232,448. Pass Backend.REFERENCE."
        )


GPU = _GPU()
