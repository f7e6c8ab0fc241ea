"""A decode step of gated delta layers by the kernels of prepare.cu and step.cu.

Nothing is added atomically and no sum depends on the batch: a sequence gets the same bits in every batch and run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tracefp4.ops.device import DeviceLibrary, KernelFile, Launch, aligned
from tracefp4.ops.gated_delta.operands import DeltaState, DeltaWeights, Prepared, Projected, Storage
from tracefp4.ops.gated_delta.reference import advance_reference, prepare_reference
from tracefp4.ops.kernels import DTYPE, check_values, first_difference

HEAD_DIMS = (64, 128)
SCOPE = (
    f"bf16 projections, states in bf16 or float32, heads of {HEAD_DIMS[0]} or {HEAD_DIMS[1]} keys and values"
)
STEP_THREADS = {torch.bfloat16: 128, torch.float32: 256}
"""Threads of a block of step.cu by the storage of the state; none keeps more than 256 bytes of a state under way."""
_PREPARING_THREADS = 128


class Case(NamedTuple):
    """What the kernels are specialised for."""

    dtype: torch.dtype
    """Of the recurrent state."""
    key_dim: int
    """Dk."""
    value_dim: int
    """Dv."""
    num_taps: int
    """K."""


def case_of(weights: DeltaWeights, state: DeltaState) -> Case:
    """Return the case of checked operands."""
    value_dim, key_dim = state.recurrent.shape[2:]
    return Case(state.recurrent.dtype, key_dim, value_dim, weights.taps.shape[0])


def is_covered(projected: Projected, weights: DeltaWeights, state: DeltaState) -> bool:
    """Return whether the kernels take checked operands; `SCOPE` says it in words."""
    has_dtypes = projected.mixed.dtype == torch.bfloat16 and state.recurrent.dtype in (
        torch.bfloat16,
        torch.float32,
    )
    has_sizes = set(state.recurrent.shape[2:]) <= set(HEAD_DIMS) and weights.taps.shape[0] > 1
    return has_dtypes and has_sizes and all(part.is_contiguous() for part in state)


def step_on_device(projected: Projected, weights: DeltaWeights, state: DeltaState, slots: Tensor) -> Tensor:
    """Advance checked sequences by a token; see `gated_delta_step`."""
    prepared = prepare_on_device(projected, weights, state, slots)
    return advance_on_device(prepared, projected.z, weights, state.recurrent, slots)


def prepare_on_device(
    projected: Projected, weights: DeltaWeights, state: DeltaState, slots: Tensor
) -> Prepared:
    """Return what the rule takes and move `state.conv` on by a token; zeros where a slot is negative."""
    mixed, a, b = (_rows(part) for part in (projected.mixed, projected.a, projected.b))
    num_slots, num_heads, value_dim, key_dim = state.recurrent.shape
    (num_taps, width), num_seqs, device = weights.taps.shape, slots.shape[0], mixed.device
    key_heads = (width - num_heads * value_dim) // (2 * key_dim)
    q, k = (torch.empty((num_seqs, key_heads, key_dim), dtype=torch.float32, device=device) for _ in range(2))
    v = torch.empty((num_seqs, num_heads, value_dim), dtype=torch.bfloat16, device=device)
    decay, beta = (torch.empty((num_seqs, num_heads), dtype=torch.float32, device=device) for _ in range(2))
    num_threads = (2 * key_heads + num_heads) * 32
    defines = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "TAPS": num_taps}
    launch = Launch(
        "prepare_heads", (-(-num_threads // _PREPARING_THREADS), num_seqs), _PREPARING_THREADS, defines
    )
    operands = (mixed, a, b, aligned(weights.taps), weights.a_log, weights.dt_bias, slots.contiguous())
    sizes = (mixed.stride(0) // 2, a.stride(0), b.stride(0), key_heads, num_heads, num_slots)
    outputs = (state.conv, q, k, v, decay, beta)
    PREPARING.launch(launch, *operands, *sizes, key_dim**-0.5, *outputs, device=device)
    return Prepared(q, k, v, decay, beta)


def advance_on_device(
    prepared: Prepared, z: Tensor, weights: DeltaWeights, recurrent: Tensor, slots: Tensor
) -> Tensor:
    """Apply the rule to the states at `slots`, in place; return the gated output [B, Hv Dv]."""
    z, device = _rows(z), z.device
    num_slots, num_heads, value_dim, key_dim = recurrent.shape
    out = torch.empty((z.shape[0], num_heads * value_dim), dtype=torch.bfloat16, device=device)
    key_heads, num_threads = prepared.k.shape[1], STEP_THREADS[recurrent.dtype]
    defines = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "STATE": DTYPE[recurrent.dtype]}
    defines["THREADS"] = num_threads
    grid = (num_heads // key_heads, key_heads, z.shape[0])
    num_bytes = value_dim * key_dim * recurrent.element_size()
    launch = Launch("step_heads", grid, num_threads, defines, num_bytes)
    operands = (*prepared, z, aligned(weights.norm), slots.contiguous())
    sizes = (z.stride(0) // 2, num_slots, float(weights.epsilon))
    LIBRARY.launch(launch, *operands, *sizes, recurrent, out, device=device)
    return out


def _rows(x: Tensor) -> Tensor:
    """Return rows of bf16 as the kernels read them: pairs of neighbours, rows any even distance apart."""
    x = x.detach().resolve_neg()
    is_readable = x.stride(1) == 1 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return x if is_readable else aligned(x)


def differences(device: torch.device, case: Case) -> str | None:
    """Compare calls of a case with the reference; return what differs, or None."""
    return first_difference(_pairs(device, case))


def _pairs(device: torch.device, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    projected, weights, state, slots = _operands(device, case)
    theirs = DeltaState(*(part.clone() for part in state))
    found = prepare_on_device(projected, weights, state, slots)
    wanted = prepare_reference(projected, weights, theirs, slots, storage=_NATIVE)
    yield "convolution states", state.conv, theirs.conv
    is_wrong = ~within(found, wanted)
    yield "queries, keys, values and gates", is_wrong, torch.zeros_like(is_wrong)
    got = advance_on_device(found, projected.z, weights, state.recurrent, slots)
    want = advance_reference(found, projected.z, weights, theirs.recurrent, slots, storage=_NATIVE)
    yield "outputs", got, want
    yield "recurrent states", state.recurrent, theirs.recurrent


def within(found: Prepared, wanted: Prepared) -> Tensor:
    """Say for every part whether it is what exponentials with other last bits allow, bool [5].

    A bf16 number may be a neighbour of the reference's, which in a query or key moves all of its head a little; decay
    is an exponential of an exponential, whose relative error grows with its logarithm.
    """
    parts = []
    for name in ("q", "k", "v", "beta"):
        got, want = (getattr(p, name).to(torch.float64) for p in (found, wanted))
        size = (
            want.abs()
            if name in ("v", "beta")
            else want.abs() + want.square().sum(-1, keepdim=True).sqrt() / 64
        )
        parts.append(((got - want).abs() <= size * 2.0**-7).all())
    got, want = found.decay.to(torch.float64), wanted.decay.to(torch.float64)
    allowed = want * (1.0 - want.log().nan_to_num(neginf=-128.0)) * 2.0**-20 + 2.0**-126
    parts.append(((got - want).abs() <= allowed).all())
    return torch.stack(parts)


def _operands(device: torch.device, case: Case) -> tuple[Projected, DeltaWeights, DeltaState, Tensor]:
    """Two sequences of one key head and two value heads, one without a state; gates neither open nor shut."""
    width = 2 * (case.key_dim + case.value_dim)
    x = torch.sin(check_values().nan_to_num(0.0, 1.0, -1.0).clamp(-1e4, 1e4)).to(device)
    wide = x.repeat(1, -(-width // x.shape[1]))[:, :width].roll(5, 1) + x.roll(1, 0)[:, :1]
    rows = wide.to(torch.bfloat16)
    # silu of 100 is 100 in any library
    z = torch.full((3, 2 * case.value_dim), 100.0, dtype=torch.bfloat16, device=device)
    projected = Projected(rows[:3], z, rows[3:6, :2], rows[3:6, 2:4])
    weights = DeltaWeights(
        taps=rows.repeat(case.num_taps, 1)[3 : 3 + case.num_taps],
        a_log=x[5, :2],
        dt_bias=x[6, :2],
        norm=rows[7, : case.value_dim].contiguous(),
        epsilon=1e-6,
    )
    conv = rows.repeat(case.num_taps, 1)[: 3 * (case.num_taps - 1)].reshape(3, case.num_taps - 1, width)
    matrices = wide.flatten().repeat(3 * case.value_dim)[: 6 * case.value_dim * case.key_dim]
    recurrent = matrices.view(3, 2, case.value_dim, case.key_dim).to(case.dtype)
    return projected, weights, DeltaState(conv, recurrent), torch.tensor([2, -1, 0], device=device)


_NATIVE = Storage(torch.bfloat16, False)
PREPARING = KernelFile(Path(__file__).with_name("prepare.cu"))
"""The kernel of prepare.cu."""
LIBRARY = DeviceLibrary(
    Path(__file__).with_name("step.cu"), differences, Case(torch.bfloat16, 128, 128, 4), scope=SCOPE
)
"""The kernel of step.cu; its check covers prepare.cu, too."""
