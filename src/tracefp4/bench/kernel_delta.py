"""Cases of a decode step of gated delta layers, with states in bf16 and in float32.

Nearly all of its bytes are the states, read once and written once. Each sequence sees one token again and again from a
state that is zero, so what is written comes to rest and one more step of the definition shows whether it is right. The
peer is the definition's arithmetic as whole tensors in torch, compiled.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tracefp4.bench.kernel_jobs import Bench, Case, Job, KernelSizes, contender
from tracefp4.bench.row import Check
from tracefp4.bench.traffic import delta_step
from tracefp4.ops.backend import Backend
from tracefp4.ops.gated_delta import DeltaState, DeltaWeights, Projected, gated_delta_step

STATES = {"": torch.bfloat16, ".fp32_state": torch.float32}
"""Ends of the ids, and how states are stored."""
ALLOWED = 2.0**-6
"""Largest relative error of an output or a state: one bf16 number off in a factor and one in the product."""
_EPSILON = 1e-6


def delta_cases(sizes: KernelSizes) -> Iterator[Case]:
    """Return all cases of this module."""
    for model, shape in sizes.models.items():
        if not shape.delta_v_heads:
            continue
        for end, dtype in STATES.items():
            name = f"kernels.delta_net.{model}.{sizes.batch}{end}"
            yield Case(id=name, op="gated_delta", build=partial(_delta, model=model, dtype=dtype))


def _delta(bench: Bench, *, model: str, dtype: torch.dtype) -> Job:
    shape, batch = bench.sizes.models[model], bench.sizes.batch
    traffic = delta_step(shape, num_seqs=batch, state_bytes=dtype.itemsize)
    bench.made.clear()
    heads, dim = shape.delta_v_heads, shape.delta_dim
    width = (2 * shape.delta_qk_heads + heads) * dim
    drawn = partial(torch.randn, generator=bench.generator(0), device=bench.device)
    weights = DeltaWeights(
        taps=drawn(shape.delta_conv, width).to(torch.bfloat16),
        a_log=drawn(heads),
        dt_bias=drawn(heads),
        norm=drawn(dim).to(torch.bfloat16),
        epsilon=_EPSILON,
    )
    # a token overwrites nearly all of what was kept under its key: states come to rest within a few steps
    given = Projected(
        *(x.to(torch.bfloat16) for x in (drawn(batch, width), drawn(batch, heads * dim))),
        *(x.to(torch.bfloat16) for x in (4.0 + drawn(batch, heads) / 4, drawn(batch, heads))),
    )
    slots = torch.randperm(batch, generator=bench.generator(1), device=bench.device)

    def states() -> DeltaState:
        conv = torch.empty(batch, shape.delta_conv - 1, width, dtype=torch.bfloat16, device=bench.device)
        conv[slots] = given.mixed[:, None].expand(-1, shape.delta_conv - 1, -1)
        return DeltaState(conv, torch.zeros(batch, heads, dim, dim, dtype=dtype, device=bench.device))

    own, of_peer = states(), states()
    step = partial(gated_delta_step, given, weights, own, slots=slots, backend=bench.backend)
    plain = partial(torch.compile(plain_step, dynamic=False), given, weights, of_peer, slots)
    return Job(
        ours=contender([step], traffic),
        theirs={"plain torch, compiled": contender([plain], traffic)},
        traffic=traffic,
        check=lambda outputs: check_step(
            outputs[0], own, partial(gated_delta_step, given, weights, slots=slots), bench.backend
        ),
        facts={"sequences": batch},
    )


def check_step(got: Tensor, state: DeltaState, step: Callable[..., Tensor], backend: Backend) -> Check:
    """Compare an output from a state at rest, and the state after one more step, with the definition's."""
    ours, theirs = (DeltaState(*(part.clone() for part in state)) for _ in range(2))
    step(state=ours, backend=backend)
    wanted = step(state=theirs, backend=Backend.REFERENCE)
    error = max(_error(got, wanted), *(_error(*pair) for pair in zip(ours, theirs, strict=True)))
    return Check(error=error, allowed=ALLOWED, text="relative, of outputs and of states after a step")


def _error(got: Tensor, wanted: Tensor) -> float:
    """The largest error in units of the value, or of 2^-7 of the whole where the value is smaller."""
    got, wanted = got.float(), wanted.float()
    size = wanted.abs() + 2.0**-7 * wanted.square().mean().sqrt()
    return float(((got - wanted).abs() / size).nan_to_num(torch.inf, torch.inf).max())


def plain_step(given: Projected, weights: DeltaWeights, state: DeltaState, slots: Tensor) -> Tensor:
    """A decode step as one writes it in torch; states are replaced in place."""
    conv, recurrent = state
    heads, dim = recurrent.shape[1], recurrent.shape[-1]
    window = torch.cat([conv[slots], given.mixed[:, None]], dim=1)
    conv[slots] = window[:, 1:]
    mixed = silu((window * weights.taps).sum(1))
    key_width = (mixed.shape[1] - heads * recurrent.shape[2]) // 2
    q, k, v = mixed.float().split([key_width, key_width, heads * recurrent.shape[2]], dim=-1)
    q, k = (torch.nn.functional.normalize(x.unflatten(-1, (-1, dim)), dim=-1) for x in (q, k))
    q, k = (x.repeat_interleave(heads // q.shape[1], dim=1)[:, :, None] for x in (q * dim**-0.5, k))
    decay = (-weights.a_log.exp() * softplus(given.a.float() + weights.dt_bias)).exp()
    s = recurrent[slots].float() * decay[..., None, None]
    delta = (v.unflatten(-1, (heads, -1)) - (s * k).sum(-1)) * given.b.sigmoid().float()[..., None]
    s = s + k * delta[..., None]
    recurrent[slots] = s.to(recurrent.dtype)
    o = (s * q).sum(-1).to(torch.bfloat16)
    normed = torch.nn.functional.rms_norm(o, weights.norm.shape, weights.norm, weights.epsilon)
    return normed.flatten(1) * silu(given.z)
