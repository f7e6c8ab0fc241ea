"""Matrices that make quantizers disagree: mostly ties, because a tie is where the order of operations shows.

Each maker takes a number of rows and returns float32 [rows, 1024] whose values are also bf16 numbers where that
matters (ties stay ties in bf16). Seeds are fixed: a difference of one byte can be looked at again.
"""

from collections.abc import Callable

import torch

WIDTH = 1024
TIES = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _signs(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0


def normal(rows: int) -> torch.Tensor:
    """What weights look like."""
    return torch.randn(rows, WIDTH, generator=_generator())


def quarters(rows: int) -> torch.Tensor:
    """Multiples of 1/4 up to 6: few distinct block maxima, many exact ties."""
    return torch.randint(-24, 25, (rows, WIDTH), generator=_generator()) / 4.0


def ties_times_scales(rows: int) -> torch.Tensor:
    """Codewords and midpoints times an E4M3 number per block; each block holds its maximum, 6 times that number."""
    generator = _generator()
    picked = TIES[torch.randint(0, len(TIES), (rows, WIDTH), generator=generator)]
    blocks = (picked * _signs((rows, WIDTH), generator)).view(rows, -1, 16)
    blocks[..., 0] = 6.0
    scales = torch.tensor([(8 + mantissa) * 2.0**n for n in range(-9, 4) for mantissa in range(8)])
    picks = torch.randint(0, len(scales), (rows, WIDTH // 16, 1), generator=generator)
    return (blocks * scales[picks]).flatten(-2)


def powers_of_two(rows: int) -> torch.Tensor:
    """Signed powers of two over 28 binades."""
    generator = _generator()
    exponents = torch.randint(-20, 8, (rows, WIDTH), generator=generator).float()
    return torch.exp2(exponents) * _signs((rows, WIDTH), generator)


def zeros(rows: int) -> torch.Tensor:
    """A third of the 32-element blocks all zero, a tenth of the rest +0.0 and a tenth -0.0."""
    generator = _generator()
    values = torch.randn(rows, WIDTH, generator=generator)
    values.view(rows, -1, 32)[torch.rand(rows, WIDTH // 32, generator=generator) < 0.33] = 0.0
    draw = torch.rand(rows, WIDTH, generator=generator)
    return torch.where(draw < 0.1, -0.0, torch.where(draw < 0.2, 0.0, values))


def tiny_blocks(rows: int) -> torch.Tensor:
    """Block maxima over 40 binades, so that many scales are subnormal, floored or flushed."""
    generator = _generator()
    binades = torch.randint(0, 40, (rows, WIDTH // 16, 1), generator=generator).float()
    blocks = torch.randn(rows, WIDTH // 16, 16, generator=generator) * torch.exp2(-binades)
    return blocks.flatten(-2)


def huge(rows: int) -> torch.Tensor:
    """The normal matrix near the top of the float32 range."""
    return normal(rows) * 1e30


def small(rows: int) -> torch.Tensor:
    """The normal matrix far below one, but with an outer scale that is still a normal float32 number."""
    return normal(rows) * 1e-30


def outliers(rows: int) -> torch.Tensor:
    """Exponentially distributed activations, of which one in three hundred is 300 times larger."""
    generator = _generator()
    values = torch.empty(rows, WIDTH).exponential_(generator=generator) * _signs((rows, WIDTH), generator)
    return torch.where(torch.rand(rows, WIDTH, generator=generator) < 1 / 300, values * 300, values)


def constants(rows: int) -> torch.Tensor:
    """Blocks whose 16 values are one number: every element is the block's maximum."""
    return torch.randn(rows, WIDTH // 16, 1, generator=_generator()).expand(-1, -1, 16).flatten(-2)


INPUTS = (
    normal,
    quarters,
    ties_times_scales,
    powers_of_two,
    zeros,
    tiny_blocks,
    huge,
    small,
    outliers,
    constants,
)


def rows_of(make: Callable[[int], torch.Tensor]) -> int:
    """How many rows a test takes: four million values of the two that show most, half a million of the others."""
    return 4096 if make in (normal, ties_times_scales) else 512
