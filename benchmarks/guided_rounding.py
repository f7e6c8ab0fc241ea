"""How far a trainer's quantized tensor lies from the rollout's, by noise between the two and by what is recorded.

Gaussian values in rows of 512; the trainer's are the rollout's plus noise * std. Printed: the relative Frobenius
distance between the two quantized tensors, the share of codes that differ, and the time of one rounding.
"""

import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tracefp4 import NVFP4_ROW_POW2
from tracefp4.ops.guided_quantize import Guide, Rounded, guided_quantize

NOISES = (0.003, 0.01, 0.03, 0.1)
ROWS, WIDTH = 400, 512


def guide_of(rollout: Rounded, *, keeps: str, decoder: str) -> Guide:
    """Build the guide that a codec would give: whole codes, or the mantissa bit of each."""
    assert rollout.codes is not None
    return Guide(
        valid=torch.ones(ROWS, dtype=torch.bool),
        outer=rollout.outer,
        block_scales=rollout.block_scales,
        codes=rollout.codes if keeps == "codes" else None,
        bits=rollout.codes & 1 if keeps == "bits" else None,
        decoder=decoder,  # type: ignore[arg-type]
    )


def methods(rollout: Rounded) -> dict[str, Callable[[Tensor], Rounded]]:
    """Return the ways to round the trainer's tensor, by name."""
    guides = {
        "nearest": None,
        "full": guide_of(rollout, keeps="codes", decoder="bracket"),
        "mantissa, bracket": guide_of(rollout, keeps="bits", decoder="bracket"),
        "mantissa, nearest_cell": guide_of(rollout, keeps="bits", decoder="nearest_cell"),
    }
    return {
        name: lambda x, guide=guide: guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide)  # type: ignore[misc]
        for name, guide in guides.items()
    }


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, 1 thread, {ROWS * WIDTH:,} values")
    x = torch.randn(ROWS, WIDTH).bfloat16().float()
    rollout = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    assert rollout.codes is not None
    print(f"{'method':24}{'noise':>8}{'distance':>10}{'codes differ':>14}{'ms':>8}")
    for noise in NOISES:
        trainer_x = (x + noise * torch.randn(x.shape)).bfloat16().float()
        for name, method in methods(rollout).items():
            started = time.perf_counter()
            result = method(trainer_x)
            elapsed_ms = 1000 * (time.perf_counter() - started)
            distance = ((result.values - rollout.values).norm() / rollout.values.norm()).item()
            assert result.codes is not None
            both = result.codes | rollout.codes
            differ = ((result.codes != rollout.codes) & (both & 7 != 0)).float().mean().item()
            print(f"{name:24}{noise:8.3f}{distance:10.4f}{differ:14.3%}{elapsed_ms:8.2f}")


if __name__ == "__main__":
    main()
