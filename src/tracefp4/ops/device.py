"""Kernels of one op on NVIDIA GPUs: compiled at first use, checked against the reference, launched on torch's stream.

A launch asks nothing of the host but its arguments, so it can be captured in a CUDA graph. Arguments are tensors (by
address), None (a null pointer), int (32 bits) and float (32 bits). The `Runner` is the GPU; tests put an emulation in
its place.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tracefp4.errors import BackendError
from tracefp4.ops import nvrtc
from tracefp4.ops.kernels import Status

Argument = Tensor | int | float | None


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


class DeviceLibrary:
    """The kernels in one .cu file."""

    def __init__(
        self,
        source: Path,
        check: Callable[[torch.device], str | None],
        *,
        contracts: bool = False,
        scope: str = "",
    ) -> None:
        """Declare a library; nothing is compiled before `status` or `launch`.

        Args:
            source: The .cu file.
            check: Compares a few calls on a device with the reference; returns what differs, or None.
            contracts: Allow fused multiply-adds; only where no byte depends on it.
            scope: Which operands the kernels take, where that is not all that the op takes; AUTO leaves the rest to
                the reference.
        """
        self._scope = f"; for {scope}" if scope else ""
        self.program = Program(source, contracts)
        self._check = check
        self._status: dict[torch.device, Status] = {}
        self.runner: Runner = GPU

    def status(self, device: torch.device) -> Status:
        """Say whether the kernels run on a device; the first call compiles and compares, once per process."""
        if device not in self._status:
            self._status[device] = self._open(device)
        return self._status[device]

    def launch(self, launch: Launch, *arguments: Argument, device: torch.device) -> None:
        """Run a kernel; a grid with an empty dimension runs nothing.

        Raises:
            BackendError: The variant does not compile, or the GPU refuses the launch.
        """
        if 0 in launch.grid:
            return
        self.runner.run(self.program, launch, arguments, device)

    def _open(self, device: torch.device) -> Status:
        if not torch.cuda.is_available():
            return Status(False, "this torch sees no NVIDIA GPU.")
        is_installed, reason = nvrtc.is_installed()
        if not is_installed:
            return Status(False, reason)
        made_by = f"{reason} for {architecture_of(device)}"
        try:
            difference = self._check(device)
        except BackendError as problem:
            return Status(False, str(problem))
        except Exception as problem:  # whatever the GPU or its binding says: the reference must still run
            return Status(
                False, f"{made_by}, refused: its check ended in {type(problem).__name__}: {problem}."
            )
        if difference is not None:
            return Status(False, f"{made_by}, refused: {difference} differ from the reference")
        return Status(True, made_by + self._scope)


def architecture_of(device: torch.device) -> str:
    """Return the architecture that code for a GPU is compiled for, with its own instructions where it has some."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def aligned(x: Tensor) -> Tensor:
    """Return x contiguous and at an address that 16-byte loads may use."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def packed_arguments(arguments: tuple[Argument, ...]) -> list[Any]:
    """Return arguments as ctypes objects: addresses, int32, float32.

    Raises:
        OverflowError: An int does not fit.
    """
    packed: list[Any] = []
    for argument in arguments:
        if argument is None or isinstance(argument, Tensor):
            packed.append(ctypes.c_void_p(None if argument is None else argument.data_ptr()))
        elif isinstance(argument, float):
            packed.append(ctypes.c_float(argument))
        else:
            if not -(2**31) <= argument < 2**31:
                raise OverflowError(f"a kernel takes 32-bit integers; got {argument}")
            packed.append(ctypes.c_int32(argument))
    return packed


class _GPU:
    """Launches on the current stream of torch."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._shared: dict[tuple[Any, ...], int] = {}

    def run(
        self, program: Program, launch: Launch, arguments: tuple[Argument, ...], device: torch.device
    ) -> None:
        from cuda.core import LaunchConfig, Stream
        from cuda.core import launch as launch_kernel

        key = (program, launch.kernel, tuple(sorted(launch.defines.items())), device)
        with torch.cuda.device(device):
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel = self._kernels[key] = _load(program, launch, device)
            if launch.shared_bytes > self._shared.get(key, _SHARED_BYTES):
                _raise_shared(kernel, launch.shared_bytes, device)
                self._shared[key] = launch.shared_bytes
            config = LaunchConfig(grid=launch.grid, block=launch.threads, shmem_size=launch.shared_bytes)
            stream = Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
            values = [
                a.value or 0 if isinstance(a, ctypes.c_void_p) else a for a in packed_arguments(arguments)
            ]
            launch_kernel(stream, config, kernel, *values)


_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel may use without being told that it may."""


def _load(program: Program, launch: Launch, device: torch.device) -> Any:
    from cuda.core import Device, ObjectCode

    index = torch.cuda.current_device() if device.index is None else device.index
    Device(index).set_current()
    built = nvrtc.build(
        program.source,
        defines=launch.defines,
        architecture=architecture_of(device),
        contracts=program.contracts,
    )
    return ObjectCode.from_cubin(built.code).get_kernel(launch.kernel)


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
