"""What the suite of kernels measures is a list of cases; a case builds its operands when its turn comes.

A case names the op that it needs; a job says who competes, how the result is checked and what the call must move.
This module times nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tracefp4.bench.replay import Call, Contender, num_sets
from tracefp4.bench.row import Check
from tracefp4.bench.traffic import Traffic
from tracefp4.ops.backend import Backend
from tracefp4.patching.catalogue import KNOWN_SHAPES
from tracefp4.patching.shapes import ModelShape

_ROUGH_BYTES_PER_S, _ROUGH_FLOPS_PER_S = 4e12, 8e14
"""About what an H200 does; only the length of a graph depends on them."""
BYTES_TEXT = "bytes that differ from the reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSizes:
    """How large operands are; every default is that of the suite."""

    rows: int = 16384
    """Rows of a large matrix."""
    width: int = 4096
    """Its columns."""
    small_rows: int = 128
    """Rows of a matrix at decode size."""
    matmul: int = 8192
    """Rows, columns and depth of the product that measures the peak."""
    grouped_tokens: tuple[int, ...] = (64, 512, 16384)
    """Tokens of the bf16 grouped products that are measured alone."""
    models: Mapping[str, ModelShape] = field(
        default_factory=lambda: {name: KNOWN_SHAPES[name] for name in ("qwen3-30b-a3b", "qwen3.5-35b-a3b")}
    )
    """Shapes of the models."""
    expert_tokens: tuple[int, ...] = (1, 8, 16, 32, 64, 256, 512, 4096, 16384, 65536)
    """Tokens of a pass through the experts."""
    zipf_tokens: tuple[int, ...] = (64, 256)
    """Those that are also measured with skewed routing."""
    attention: tuple[tuple[str, int, int], ...] = (
        ("qwen3.5-35b-a3b", 16, 32768),
        ("qwen3.5-35b-a3b", 8, 131072),
        ("qwen3.5-35b-a3b", 1, 131072),
        ("qwen3-30b-a3b", 32, 32768),
    )
    """Model, sequences and context of decode steps."""
    page_size: int = 64
    """Tokens of a page."""
    batch: int = 256
    """Sequences of a step where nothing else is said."""
    sample_model: str = "qwen3.5-35b-a3b"
    """Whose head is sampled from."""
    refit_model: str = "qwen3-30b-a3b"
    """Whose experts take new weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where and how large."""

    device: torch.device
    """The GPU; the CPU in tests."""
    cache_bytes: int
    """Its second-level cache."""
    sizes: KernelSizes = field(default_factory=KernelSizes)
    """Operands."""
    backend: Backend = Backend.CUDA
    """What is measured; the reference in tests."""
    made: dict[str, Any] = field(default_factory=dict)
    """Large operands that neighbouring cases share, by name."""

    def sets(self, num_bytes: float) -> int:
        """Return how many sets of operands of so many bytes a job rotates through."""
        return num_sets(num_bytes, self.cache_bytes)

    def generator(self, seed: int) -> torch.Generator:
        """Return a source of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return an operand by name; making one forgets the others."""
        if name not in self.made:
            self.made.clear()
            self.made[name] = make()
        return self.made[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure to measure, with its operands."""

    ours: Contender
    """What is measured."""
    theirs: Mapping[str, Contender]
    """Who competes; the fastest is the row's peer."""
    traffic: Traffic
    """What a call must move and compute."""
    check: Callable[[list[Any]], Check] | None
    """Compares results, one per set of operands; None for a yardstick."""
    unit: Literal["us", "ms"] = "us"
    """Of the row's values."""
    count: int = 1
    """Calls that the row's value stands for."""
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """What else belongs to the figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A row that can be measured."""

    id: str
    """Id of the row: kernels.GROUP..."""
    op: str
    """Op that it needs, a key of IMPLEMENTED; empty for a yardstick."""
    build: Callable[[Bench], Job]
    """Make its operands."""

    @property
    def group(self) -> str:
        """What `--only` selects by."""
        return self.id.split(".")[1]


def contender(calls: Sequence[Call], traffic: Traffic) -> Contender:
    """Return calls that move so much each as a contender."""
    return Contender(
        calls=calls, least_s=max(traffic.bytes / _ROUGH_BYTES_PER_S, traffic.flops / _ROUGH_FLOPS_PER_S)
    )


def copies(sources: Sequence[torch.Tensor], traffic: Traffic) -> dict[str, Contender]:
    """Return a bf16 copy of every tensor in two ways: torch's own copy is no kernel in a graph, and either may be the
    faster one."""
    return {
        "bf16 copy": contender([source.clone for source in sources], traffic),
        "bf16 copy by a kernel": contender([lambda x=x: torch.add(x, 0) for x in sources], traffic),  # type: ignore[misc]
    }


def count_of_differences(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Return how many bytes of two tensors of one shape and dtype differ."""
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (got, wanted)]
    return int((as_bytes[0] != as_bytes[1]).sum())


def same_bytes(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Check:
    """Return the check of results that must equal the reference's byte for byte."""
    errors = [count_of_differences(got, wanted) for got, wanted in pairs]
    return Check(error=float(sum(errors)), allowed=0.0, text=BYTES_TEXT)
