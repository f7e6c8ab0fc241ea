"""Which implementation of an op runs: named backends, one choice per op and device, and an explanation of
every choice.

`AUTO` takes the fastest backend that exists for the device and equals the reference byte for byte; a backend
asked for by name is used or refused, never replaced. REFERENCE is plain torch and runs wherever torch runs;
COMPILED is C, compiled by this machine's compiler at first use, for tensors on the CPU; CUDA is CUDA C++, compiled by
NVIDIA's runtime compiler at first use, for tensors on NVIDIA GPUs.
"""

import enum
import importlib
import os
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tracefp4.errors import BackendError
from tracefp4.ops.device import DeviceLibrary
from tracefp4.ops.kernels import Library, Status


class Backend(enum.Enum):
    """Names of implementations."""

    AUTO = "auto"
    """The fastest implementation that exists for the device."""
    CUDA = "cuda"
    """CUDA C++ for NVIDIA GPUs; needs the extra `cuda`."""
    COMPILED = "compiled"
    """C for this machine's processor; needs a C compiler at first use."""
    REFERENCE = "reference"
    """The definition, in plain torch."""


IMPLEMENTED: dict[str, tuple[Backend, ...]] = {
    "quantize": (Backend.CUDA, Backend.COMPILED, Backend.REFERENCE),
    "search_scales": (Backend.COMPILED, Backend.REFERENCE),
    "dequantize": (Backend.CUDA, Backend.COMPILED, Backend.REFERENCE),
    "guided_quantize": (Backend.CUDA, Backend.COMPILED, Backend.REFERENCE),
    "syndromes": (Backend.CUDA, Backend.COMPILED, Backend.REFERENCE),
    "saturation": (Backend.CUDA, Backend.REFERENCE),
    "grouped_matmul": (Backend.REFERENCE,),
    "expert_layer": (Backend.CUDA, Backend.REFERENCE),
    "kv_append": (Backend.CUDA, Backend.REFERENCE),
    "kv_attention": (Backend.CUDA, Backend.REFERENCE),
    "rms_norm": (Backend.CUDA, Backend.REFERENCE),
    "swiglu": (Backend.CUDA, Backend.REFERENCE),
    "rotary": (Backend.CUDA, Backend.REFERENCE),
    "route": (Backend.CUDA, Backend.REFERENCE),
    "sample": (Backend.CUDA, Backend.REFERENCE),
    "gated_delta": (Backend.CUDA, Backend.REFERENCE),
}
"""Backends of each op, fastest first."""


def choose(
    op: str, device: torch.device | str, asked: Backend = Backend.AUTO, case: Hashable | None = None
) -> Backend:
    """Return the backend that runs an op on a device.

    Args:
        op: A key of IMPLEMENTED.
        device: Where the operands live.
        asked: A named backend, or AUTO.
        case: What the operands are to the kernels for GPUs, as the op's `device.py` says; a case that differs from the
            reference is refused, or left to another backend, alone. None asks about the op's usual case.

    Returns:
        A backend other than AUTO.

    Raises:
        BackendError: When the op is unknown, `asked` is not a Backend, the device holds no data, the op
            lacks the backend, here or everywhere, or a case is met for the first time while a CUDA graph is captured.
    """
    if not isinstance(asked, Backend):
        raise BackendError(
            f"backend must be a Backend; got {asked!r}. Backends: {', '.join(b.name for b in Backend)}. "
            "Pass one of them, for example Backend.AUTO."
        )
    if op not in IMPLEMENTED:
        raise BackendError(f"Unknown op {op!r}. Ops: {', '.join(IMPLEMENTED)}. Check the spelling.")
    if torch.device(device).type == "meta":
        raise BackendError(
            f"{op} needs data; got a tensor on the 'meta' device, which has none. Materialise it first."
        )
    available = IMPLEMENTED[op]
    if asked is Backend.AUTO:
        return next(b for b in available if _status(op, b, device, case).is_usable)
    if asked not in available:
        raise BackendError(
            f"{op} has no backend {asked.name}; it has {', '.join(b.name for b in available)}. "
            "Pass one of these or AUTO."
        )
    is_usable, reason = _status(op, asked, device, case)
    if not is_usable:
        raise BackendError(f"{op} cannot run {asked.name} here: {reason} Or pass Backend.REFERENCE or AUTO.")
    return asked


def explain(device: torch.device | str = "cpu") -> list[dict[str, str]]:
    """Return one row per op for `tracefp4 doctor`; what has to be compiled is, in parallel.

    Args:
        device: The device to explain the choice for.

    Returns:
        Rows with the keys "op", "device", "backend" and "reason".
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        choices = list(pool.map(lambda op: choose(op, device), IMPLEMENTED))
    rows = []
    for (op, available), chosen in zip(IMPLEMENTED.items(), choices, strict=True):
        reason = "the only implementation" if len(available) == 1 else _reason(op, chosen, device)
        rows.append({"op": op, "device": str(device), "backend": chosen.value, "reason": reason})
    return rows


def _reason(op: str, chosen: Backend, device: torch.device | str) -> str:
    """Say who made the chosen implementation, or why the one that is meant for the device cannot run."""
    meant = Backend.CUDA if torch.device(device).type == "cuda" else Backend.COMPILED
    if meant not in IMPLEMENTED[op]:
        return f"no {meant.name} kernel exists"
    return _status(op, meant if chosen is Backend.REFERENCE else chosen, device).reason


def _status(op: str, backend: Backend, device: torch.device | str, case: Hashable | None = None) -> Status:
    """Return whether a backend of an op runs on a device, and who compiled it or why not."""
    device = torch.device(device)
    if backend is Backend.REFERENCE:
        return Status(True, "plain torch")
    needed = "cuda" if backend is Backend.CUDA else "cpu"
    if device.type != needed:
        what = "CUDA" if backend is Backend.CUDA else "compiled"
        where = "an NVIDIA GPU" if backend is Backend.CUDA else "the CPU"
        return Status(False, f"{what} kernels read tensors on {where}, not on {device.type}.")
    library = _LIBRARIES.get((op, backend))
    if library is None:
        # By name, because ops import this module, and never each other.
        module = "device" if backend is Backend.CUDA else "compiled"
        library = _LIBRARIES[op, backend] = importlib.import_module(f"tracefp4.ops.{op}.{module}").LIBRARY
    return library.status(device, case) if isinstance(library, DeviceLibrary) else library.status()


_LIBRARIES: dict[tuple[str, Backend], Library | DeviceLibrary[Any]] = {}
