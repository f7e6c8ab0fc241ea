"""A scheme as the kernels read it: numbers in the order of `struct scheme` in scaling.h.

The numbers of orders, rules, candidates, ties and signs are their places in formats/order.py, which the enums of
scaling.h and e2m1.h follow; the self-check of every library would notice another order. This module computes nothing.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.formats.order import Candidates, ErrorSum, Order, ScaleRule, Sign, Tie
from tracefp4.formats.scheme import Scheme
from tracefp4.ops.kernels import DTYPE


class SchemeCase(NamedTuple):
    """What kernels for GPUs that round or decode are specialised for."""

    scheme: Scheme
    """The scheme."""
    dtype: torch.dtype
    """Of the values as the kernels read or write them; a key of DTYPE."""

    @property
    def defines(self) -> dict[str, int | str]:
        """The constants of blocks.cuh: SCHEME, the numbers of `rules_of`, and DTYPE."""
        return {"SCHEME": _between_braces(self.scheme), "DTYPE": DTYPE[self.dtype]}

    def __str__(self) -> str:
        return f"{self.scheme.name} in {self.dtype}"


def case_of(x: Tensor, scheme: Scheme) -> SchemeCase:
    """Return the case of an operand that is read by `kernels.readable`."""
    return SchemeCase(scheme, x.dtype if x.dtype in DTYPE else torch.float32)


@lru_cache(maxsize=256)
def rules_of(scheme: Scheme) -> Tensor:
    """Return a scheme as `struct scheme`.

    Args:
        scheme: Any; 6 * scale_max must be an integer, as 448 and 256 give.

    Returns:
        int32 [11]; shared by all callers, never written.
    """
    return torch.tensor(
        [
            scheme.block_size,
            _place(Order, scheme.order),
            _place(ScaleRule, scheme.scale_rule),
            _place(Candidates, scheme.candidates),
            _place(ErrorSum, scheme.error_sum),
            _place(Tie, scheme.tie),
            _place(Sign, scheme.sign),
            int(6 * scheme.scale_max),
            scheme.zero_byte,
            scheme.underflow_byte,
            scheme.least_byte,
        ],
        dtype=torch.int32,
        device="cpu",
    )


@lru_cache(maxsize=256)
def _between_braces(scheme: Scheme) -> str:
    return ",".join(str(number) for number in rules_of(scheme).tolist())


def _place(members: type[StrEnum], member: StrEnum) -> int:
    return list(members).index(member)
