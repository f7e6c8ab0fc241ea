"""Which implementation of an op runs: named backends, one choice per op and device, and an explanation of
every choice.

`AUTO` takes the fastest backend that exists for the device and equals the reference byte for byte; a
backend asked for by name is used or refused, never replaced. Today every op has one implementation, the
reference, which is plain torch and runs wherever torch runs.
"""

import enum

import torch

from tracefp4.errors import BackendError


class Backend(enum.Enum):
    """Names of implementations."""

    AUTO = "auto"
    """The fastest implementation that exists for the device."""
    REFERENCE = "reference"
    """The definition, in plain torch."""


IMPLEMENTED: dict[str, tuple[Backend, ...]] = {
    "quantize": (Backend.REFERENCE,),
    "dequantize": (Backend.REFERENCE,),
    "guided_quantize": (Backend.REFERENCE,),
    "grouped_matmul": (Backend.REFERENCE,),
    "kv_append": (Backend.REFERENCE,),
    "kv_attention": (Backend.REFERENCE,),
}
"""Backends of each op, fastest first."""


def choose(op: str, device: torch.device | str, asked: Backend = Backend.AUTO) -> Backend:
    """Return the backend that runs an op on a device.

    Args:
        op: A key of IMPLEMENTED.
        device: Where the operands live.
        asked: A named backend, or AUTO.

    Returns:
        A backend other than AUTO.

    Raises:
        BackendError: When the op is unknown, `asked` is not a Backend, the device holds no data, or the op
            lacks it.
    """
    if not isinstance(asked, Backend):
        raise BackendError(
            f"backend must be a Backend; got {asked!r}. Backends: {', '.join(b.name for b in Backend)}. "
            "Pass Backend.AUTO or Backend.REFERENCE."
        )
    if op not in IMPLEMENTED:
        raise BackendError(f"Unknown op {op!r}. Ops: {', '.join(IMPLEMENTED)}. Check the spelling.")
    if torch.device(device).type == "meta":
        raise BackendError(
            f"{op} needs data; got a tensor on the 'meta' device, which has none. Materialise it first."
        )
    available = IMPLEMENTED[op]
    if asked is Backend.AUTO:
        return available[0]
    if asked not in available:
        raise BackendError(
            f"{op} has no backend {asked.name}; it has {', '.join(b.name for b in available)}. "
            "Pass one of these or AUTO."
        )
    return asked


def explain(device: torch.device | str = "cpu") -> list[dict[str, str]]:
    """Return one row per op for `tracefp4 doctor`.

    Args:
        device: The device to explain the choice for.

    Returns:
        Rows with the keys "op", "device", "backend" and "reason".
    """
    rows = []
    for op, available in IMPLEMENTED.items():
        chosen = choose(op, device)
        reason = "the only implementation" if len(available) == 1 else "the fastest that equals the reference"
        rows.append({"op": op, "device": str(device), "backend": chosen.value, "reason": reason})
    return rows
