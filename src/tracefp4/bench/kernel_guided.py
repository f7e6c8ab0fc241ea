"""Cases of rounding with a record: what a rollout keeps of it in the same pass, and a trainer that follows it.

Both by what a codec keeps: whole codes, mantissa bits, or syndromes; the codec that recipes have by default is followed
inside a noise gate, as there. The yardstick is the bandwidth of a copy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench import peers
from tracefp4.bench.kernel_elementwise import COMPILED, compiled, normal_inputs, over
from tracefp4.bench.kernel_jobs import Bench, Case, Job, contender, same_bytes
from tracefp4.bench.row import Check
from tracefp4.bench.traffic import BF16, elementwise
from tracefp4.coding import Payload, ScaleCoding, codec_by_name
from tracefp4.formats import NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import Guide, guided_quantize, recorded_quantize
from tracefp4.ops.quantize import quantize
from tracefp4.patching.rules import PlanRules
from tracefp4.qat.ste import straight_through

DEFAULT = PlanRules().guidance
"""The codec of recipes that name none."""
CODECS = ("full", "mantissa", "secded", DEFAULT)
BAND = 0.0625
"""Noise gate of the default codec, a usual width."""
_SCALES = 1 / 16
_SCALE_BITS = {ScaleCoding.COSET2: 3, ScaleCoding.COSET1: 1}


def guided_cases() -> Iterator[Case]:
    """Return all cases of this module."""
    for name in ("full", DEFAULT):
        yield Case(id=f"kernels.recorded.{name}", op="guided_quantize", build=_of_codec(_recorded_job, name))
    for name in CODECS:
        yield Case(id=f"kernels.guided.{name}", op="guided_quantize", build=_of_codec(_guided_job, name))
    yield Case(id="kernels.guided.backward", op="guided_quantize", build=_backward_job)


def _of_codec(build: Callable[[Bench, str], Job], name: str) -> Callable[[Bench], Job]:
    return lambda bench: build(bench, name)


def _recorded_job(bench: Bench, name: str) -> Job:
    """Rounding that writes what a codec keeps, beside rounding that writes values alone."""
    codec, (rows, width) = codec_by_name(name), (bench.sizes.rows, bench.sizes.width)
    kept = codec.payload_bytes(width) / width
    if codec.scale_coding is not ScaleCoding.RAW:  # raw scales are those that are written anyway
        kept += codec.scale_bytes(width // 16) / width
    traffic, without = (elementwise(rows * width, BF16, BF16, part, _SCALES) for part in (kept, 0.0))
    inputs = normal_inputs(bench, rows, traffic)

    def recorded(x: Tensor, backend: Backend = bench.backend) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = recorded_quantize(x, scheme=NVFP4_ROW_POW2, codec=codec, with_codes=False, backend=backend)
        return found.rounded.values, found.rounded.outer, found.payload, found.scales

    def unrecorded(x: Tensor) -> Tensor:
        return guided_quantize(x, scheme=NVFP4_ROW_POW2, with_codes=False, backend=bench.backend).values

    def check(outputs: list[tuple[Tensor, ...]]) -> Check:
        return same_bytes(*zip(outputs[0], recorded(inputs[0], Backend.REFERENCE), strict=True))

    return Job(
        ours=contender(over(inputs, recorded), traffic),
        theirs={"no record": contender(over(inputs, unrecorded), without)},
        traffic=traffic,
        check=check,
    )


def _guided_job(bench: Bench, name: str) -> Job:
    """A trainer's values, slightly moved, follow the rollout's record."""
    rows, width = bench.sizes.rows, bench.sizes.width
    traffic = elementwise(rows * width, BF16, BF16, _guide_bytes(name, width), _SCALES)
    inputs = normal_inputs(bench, rows, traffic)
    guides = [guide_of(x, name, bench.backend) for x in inputs]
    moved = [x * (1 + 2.0**-7) for x in inputs]
    scales = [quantize(x, scheme=NVFP4_ROW_POW2, backend=bench.backend).scales() for x in inputs]

    def check(outputs: list[Tensor]) -> Check:
        return same_bytes((outputs[0], _follow(moved[0], guides[0], Backend.REFERENCE)))

    pairs = zip(moved, guides, strict=True)
    return Job(
        ours=contender([lambda x=x, g=g: _follow(x, g, bench.backend) for x, g in pairs], traffic),  # type: ignore[misc]
        theirs={COMPILED: compiled(peers.round_plainly, list(zip(moved, scales, strict=True)), traffic)},
        traffic=traffic,
        check=check,
        facts={"codec": name, "gate": BAND if name == DEFAULT else "none"},
    )


def _follow(x: Tensor, guide: Guide, backend: Backend) -> Tensor:
    found = guided_quantize(x, scheme=NVFP4_ROW_POW2, guide=guide, with_codes=False, backend=backend)
    return found.values  # scales may be the guide's own


def _guide_bytes(name: str, width: int) -> float:
    """Bytes of a value that a guide holds beside scales: codes and bits take one, syndromes are packed."""
    codec = codec_by_name(name)
    return 1.0 if codec.code is None else codec.code.row_bytes(width) / width


def guide_of(x: Tensor, name: str, backend: Backend) -> Guide:
    """Return what a rollout recorded of x, as a trainer gets it.

    Args:
        x: bfloat16 [N, K].
        name: Of a codec: `full`, `mantissa`, or one with syndromes of codes and scales raw or as cosets.
        backend: Implementation that records.
    """
    codec = codec_by_name(name)
    found = recorded_quantize(x, scheme=NVFP4_ROW_POW2, codec=codec, backend=backend)
    codes, scales = found.rounded.codes, found.rounded.block_scales
    assert codes is not None
    return Guide(
        valid=torch.ones(x.shape[0], dtype=torch.bool, device=x.device),
        outer=found.rounded.outer,
        block_scales=scales & _SCALE_BITS.get(codec.scale_coding, 255),
        scale_coding=codec.scale_coding,
        codes=codes if codec.payload is Payload.FULL else None,
        bits=codes & 1 if codec.payload is Payload.MANTISSA else None,
        syndromes=found.payload if codec.payload is Payload.SYNDROME else None,
        code=codec.code,
        band=BAND if name == DEFAULT else None,
    )


def _backward_job(bench: Bench) -> Job:
    """Forward and straight-through backward, beside two bf16 copies."""
    rows, width = bench.sizes.rows, bench.sizes.width
    traffic = elementwise(rows * width, BF16, BF16, 1, _SCALES, BF16, BF16)
    leaves = [x.requires_grad_() for x in normal_inputs(bench, rows, traffic)]
    guides = [guide_of(x.detach(), "full", bench.backend) for x in leaves]
    gradient = torch.randn_like(leaves[0]).detach()

    def both(x: Tensor, guide: Guide) -> Tensor:
        y = straight_through(x, _follow(x.detach(), guide, bench.backend))
        torch.autograd.grad(y, x, gradient)
        return y.detach()

    def copies(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach().clone(), gradient.clone()

    def check(outputs: list[Any]) -> Check:
        return same_bytes((outputs[0], _follow(leaves[0].detach(), guides[0], Backend.REFERENCE)))

    pairs = zip(leaves, guides, strict=True)
    return Job(
        ours=contender([lambda x=x, g=g: both(x, g) for x, g in pairs], traffic),  # type: ignore[misc]
        theirs={"two bf16 copies": contender(over(leaves, copies), elementwise(leaves[0].numel(), 8.0))},
        traffic=traffic,
        check=check,
    )
