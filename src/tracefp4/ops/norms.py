"""The RMS norm of bf16 rows, for the definitions of ops that norm: the factor in float64, products rounded to bf16.

norms.cuh is the same for kernels. This module picks no rows and no heads.
"""

import torch
from torch import Tensor


def rms_normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return R(weight * R(x * r)) with r = float32(1 / sqrt(mean of x^2 + float32(epsilon))), R rounding to bf16; or
    R(weight * (x * r)), rounded once, under a float32 weight.

    Args:
        x: bfloat16 [..., D]; the mean is over the last dimension, in float64, so that its order does not show.
        weight: bfloat16 or float32 [D].
        epsilon: Added to the mean square.
    """
    squares = x.to(torch.float64).square().sum(-1, keepdim=True)
    added = torch.tensor(epsilon, dtype=torch.float32, device="cpu").to(torch.float64).item()
    factor = (squares * (1.0 / x.shape[-1]) + added).sqrt().reciprocal().to(torch.float32)
    normed = x.to(torch.float32) * factor
    return (normed.to(weight.dtype) * weight).to(torch.bfloat16)
