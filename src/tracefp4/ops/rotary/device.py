"""rotary by the kernel of kernel.cu: the same bytes as `reference.py`, queries and keys in one launch."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.ops.device import Argument, DeviceLibrary, Launch, aligned, heads_in_place
from tracefp4.ops.kernels import check_values, first_difference
from tracefp4.ops.rotary.operands import Angles, HeadNorms
from tracefp4.ops.rotary.reference import rotary_reference

_THREADS = 128


class Case(NamedTuple):
    """What the kernel is specialised for."""

    head_dim: int
    """Values of a head."""
    has_norms: bool
    """Whether heads are normed."""


def rotary_on_device(
    q: Tensor, k: Tensor, norms: HeadNorms | None, angles: Angles, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm and rotate checked heads; see `rotary`."""
    q, k = heads_in_place(q), heads_in_place(k)
    (num_tokens, num_q, head_dim), num_k = q.shape, k.shape[1]
    outs = tuple(
        torch.empty((num_tokens, n, head_dim), dtype=q.dtype, device=q.device) for n in (num_q, num_k)
    )
    team = head_dim // 16
    weights: tuple[Argument, ...] = (None, None)
    if norms is not None:
        weights = tuple(aligned(weight.detach().resolve_neg()) for weight in (norms.q, norms.k))
    tables = [aligned(table.resolve_neg()) for table in angles]
    grid = (-(-num_tokens * (num_q + num_k) * team // _THREADS),)
    launch = Launch("norm_and_rotate", grid, _THREADS, {"TEAM": team, "NORMS": int(norms is not None)})
    tail: tuple[Argument, ...] = (angles.cos.shape[0], positions.contiguous(), num_tokens, num_q, num_k)
    heads: tuple[Argument, ...] = (q, k, q.stride(0), k.stride(0))
    epsilon = 0.0 if norms is None else float(norms.epsilon)
    LIBRARY.launch(launch, *heads, *weights, *tables, *tail, epsilon, *outs, device=q.device)
    return outs[0], outs[1]


def differences(device: torch.device, case: Case) -> str | None:
    """Compare heads of one size with the reference; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    head_dim = case.head_dim
    x = check_values().to(device, torch.bfloat16).repeat(1, -(-head_dim // 64))[:, :head_dim]
    q, k = x.reshape(4, 2, head_dim), x.flip(0)[:4].reshape(4, 1, head_dim)
    norms = HeadNorms(x[4].abs() + 0.5, x[0] + 0.25, 1e-6) if case.has_norms else None
    turns = torch.arange(5 * head_dim, device=device).view(5, head_dim).to(torch.float32) * 0.1
    angles = Angles(turns.cos().to(torch.bfloat16), turns.sin().to(torch.bfloat16))
    positions = torch.tensor([4, 0, 5, 2], device=device)
    got = rotary_on_device(q, k, norms, angles, positions)
    wanted = rotary_reference(q, k, norms, angles, positions)
    yield "queries", got[0], wanted[0]
    yield "keys", got[1], wanted[1]


LIBRARY = DeviceLibrary(Path(__file__).with_name("kernel.cu"), differences, Case(128, True))
"""The kernel of kernel.cu."""
