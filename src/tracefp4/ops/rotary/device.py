"""rotary by the kernel of kernel.cu: the same bytes as `reference.py`, queries and keys in one launch."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.ops.device import Argument, DeviceLibrary, Launch, aligned, heads_in_place
from tracefp4.ops.kernels import check_values, first_difference
from tracefp4.ops.rotary.operands import Angles, HeadNorms
from tracefp4.ops.rotary.reference import rotary_reference

_THREADS = 128


def rotary_on_device(
    q: Tensor, k: Tensor, norms: HeadNorms, angles: Angles, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm and rotate checked heads; see `rotary`."""
    q, k = heads_in_place(q), heads_in_place(k)
    (num_tokens, num_q, head_dim), num_k = q.shape, k.shape[1]
    outs = tuple(
        torch.empty((num_tokens, n, head_dim), dtype=q.dtype, device=q.device) for n in (num_q, num_k)
    )
    team = head_dim // 16
    weights = [aligned(weight.detach().resolve_neg()) for weight in (norms.q, norms.k)]
    tables = [aligned(table.resolve_neg()) for table in angles]
    grid = (-(-num_tokens * (num_q + num_k) * team // _THREADS),)
    launch = Launch("norm_and_rotate", grid, _THREADS, {"TEAM": team})
    tail: tuple[Argument, ...] = (angles.cos.shape[0], positions.contiguous(), num_tokens, num_q, num_k)
    heads: tuple[Argument, ...] = (q, k, q.stride(0), k.stride(0))
    LIBRARY.launch(launch, *heads, *weights, *tables, *tail, float(norms.epsilon), *outs, device=q.device)
    return outs[0], outs[1]


def differences(device: torch.device, head_dim: int) -> str | None:
    """Compare heads of one size with the reference; return what differs, or None."""
    return first_difference(_pairs(device, head_dim))


def _pairs(device: torch.device, head_dim: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = check_values().to(device, torch.bfloat16).repeat(1, -(-head_dim // 64))[:, :head_dim]
    q, k = x.reshape(4, 2, head_dim), x.flip(0)[:4].reshape(4, 1, head_dim)
    norms = HeadNorms(x[4].abs() + 0.5, x[0] + 0.25, 1e-6)
    turns = torch.arange(5 * head_dim, device=device).view(5, head_dim).to(torch.float32) * 0.1
    angles = Angles(turns.cos().to(torch.bfloat16), turns.sin().to(torch.bfloat16))
    positions = torch.tensor([4, 0, 5, 2], device=device)
    got = rotary_on_device(q, k, norms, angles, positions)
    wanted = rotary_reference(q, k, norms, angles, positions)
    yield "queries", got[0], wanted[0]
    yield "keys", got[1], wanted[1]


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, 128)
"""The kernel of kernel.cu."""
