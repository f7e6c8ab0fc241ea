"""Small tensors of constants that are read on whatever device the values are."""

import torch
from torch import Tensor


class Constant:
    """A constant; every device and dtype gets a copy of its own at its first use, which is kept.

    A copy from host memory waits for all that a GPU was told to do before it. So only the first use of a device may
    cost that, and it must lie outside of a CUDA graph.
    """

    def __init__(self, values: Tensor) -> None:
        """Keep values in host memory, which nobody writes to."""
        self._values = values
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values on a device, by default in their own dtype; shared by all callers, not to be written."""
        wanted = (device, self._values.dtype if dtype is None else dtype)
        if wanted not in self._copies:
            with torch.inference_mode(False):
                found = self._values.to(device=device, dtype=wanted[1])
            if type(found) is not Tensor:  # of a tracer, whose tensors are nobody else's
                return found
            self._copies[wanted] = found
        return self._copies[wanted]
