"""What tests over all schemes share: the schemes, a static exponent for those that need one, and hard matrices."""

import torch
from hypothesis import strategies as st
from tests.peers import inputs

from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import SCHEMES

ALL = list(SCHEMES.values())
GUIDED = [scheme for scheme in ALL if scheme.outer != "tensor"]
FOUR_OVER_SIX = [scheme for scheme in ALL if "4OVER6" in scheme.name]
STATIC_EXPONENT = -3


def by_name(scheme: Scheme) -> str:
    return scheme.name


def exponent_of(scheme: Scheme) -> int | None:
    return STATIC_EXPONENT if scheme.outer == "static" else None


def hard_matrices() -> list[torch.Tensor]:
    """Ties, floors, zeros of both signs, 40 binades, NaN and Inf; [12, 128] each, float32."""
    found = [make(12)[:, :128].contiguous() for make in inputs.INPUTS]
    bad = torch.randn(12, 128)
    bad[1, 3], bad[2, 40], bad[2, 77], bad[5] = float("nan"), float("inf"), -float("inf"), -0.0
    return [*found, bad, torch.zeros(2, 64), -torch.zeros(2, 64), torch.full((2, 64), 1e-38), bad[1:2, :32]]


def random_matrix(seed: int, rows: int = 4, width: int = 64) -> torch.Tensor:
    """Normal values times a power of two per block; every block maximum within 2^-6 of the tensor's."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width // 32, 32, generator=generator)
    x[..., 0] = 3.5
    return (
        x * torch.exp2(-torch.randint(0, 5, (rows, width // 32, 1), generator=generator).float())
    ).flatten(-2)


SEEDS = st.integers(0, 2**32 - 1)
