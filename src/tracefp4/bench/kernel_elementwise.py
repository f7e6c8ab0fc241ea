"""Cases of ops that touch every value once: quantize and pack, dequantize, syndromes of codes.

The yardstick is a bf16 copy: what a call must read and write, over the bandwidth of that copy, is the row's limit.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench import peers
from tracefp4.bench.kernel_jobs import Bench, Case, Job, contender, copies, same_bytes
from tracefp4.bench.replay import Call, Contender
from tracefp4.bench.traffic import BF16, MXFP4, NVFP4, Traffic, elementwise
from tracefp4.coding import syndrome_code
from tracefp4.formats import MXFP4_FLOOR, NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.backend import Backend
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.syndromes import encode_syndromes

SCHEMES = (NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, MXFP4_FLOOR)
CODE = "secded"
COMPILED = "plain torch, compiled"
_EXPONENT = -9
"""Static exponent under which normal values use the range of the block scales, as a row's own would."""


def elementwise_cases() -> Iterator[Case]:
    """Return all cases of this module."""
    for scheme in SCHEMES:
        yield Case(id=f"kernels.quantize.{scheme.name}", op="quantize", build=_quantizing(scheme))
    yield Case(id="kernels.quantize.small", op="quantize", build=_quantize_small)
    yield Case(id="kernels.dequantize.NVFP4_ROW_POW2", op="dequantize", build=_dequantize)
    yield Case(id=f"kernels.syndromes.{CODE}", op="syndromes", build=_syndromes)


def normal_inputs(bench: Bench, rows: int, traffic: Traffic) -> list[Tensor]:
    """Return normal bf16 matrices, as many as no cache can hold."""
    generator = bench.generator(0)
    shape = (rows, bench.sizes.width)
    return [
        torch.randn(shape, generator=generator, device=bench.device, dtype=torch.bfloat16)
        for _ in range(bench.sets(traffic.bytes))
    ]


def _exponent(scheme: Scheme) -> int | None:
    return _EXPONENT if scheme.outer == "static" else None


def over(inputs: list[Tensor], call: Callable[[Tensor], Any]) -> list[Call]:
    """Return a call for every input."""
    return [lambda x=x: call(x) for x in inputs]  # type: ignore[misc]


def compiled(call: Callable[..., Any], operands: list[tuple[Tensor, ...]], traffic: Traffic) -> Contender:
    """Return one of the plain functions of `peers`, by torch.compile, over sets of operands."""
    tables = peers.plain_tables(operands[0][0].device)
    faster = torch.compile(call, dynamic=False)
    return contender([lambda o=o: faster(*o, tables) for o in operands], traffic)  # type: ignore[misc]


def _quantizing(scheme: Scheme) -> Callable[[Bench], Job]:
    def build(bench: Bench) -> Job:
        return _quantize_job(bench, scheme, bench.sizes.rows)

    return build


def _quantize_job(bench: Bench, scheme: Scheme, rows: int) -> Job:
    stored = MXFP4 if scheme.block_size == 32 else NVFP4
    reads = (BF16, BF16) if scheme.outer == "tensor" else (BF16,)
    traffic = elementwise(rows * bench.sizes.width, *reads, stored)
    inputs = normal_inputs(bench, rows, traffic)
    theirs: dict[str, Contender] = {}
    if scheme.block_size == peers.BLOCK_SIZE:
        theirs[COMPILED] = compiled(peers.quantize_plainly, [(x,) for x in inputs], traffic)
    torchao = peers.torchao_quantize if scheme.block_size == peers.BLOCK_SIZE else peers.torchao_mx_quantize
    calls = [call for call in map(torchao, inputs) if call is not None]
    if calls:
        theirs["torchao"] = contender(calls, traffic)

    def ours(x: Tensor) -> BlockTensor:
        return quantize(x, scheme=scheme, exponent=_exponent(scheme), backend=bench.backend)

    def check(outputs: list[BlockTensor]) -> Any:
        wanted = quantize(inputs[0], scheme=scheme, exponent=_exponent(scheme), backend=Backend.REFERENCE)
        got = outputs[0]
        pairs = [(got.packed, wanted.packed), (got.block_scales, wanted.block_scales)]
        if scheme.outer in ("row", "tensor"):
            pairs.append((got.outer, wanted.outer))
        return same_bytes(*pairs)

    return Job(ours=contender(over(inputs, ours), traffic), theirs=theirs, traffic=traffic, check=check)


def _quantize_small(bench: Bench) -> Job:
    job = _quantize_job(bench, NVFP4_ROW_POW2, bench.sizes.small_rows)
    inputs = normal_inputs(bench, bench.sizes.small_rows, job.traffic)
    return Job(
        ours=job.ours,
        theirs=copies(inputs, elementwise(inputs[0].numel(), BF16, BF16)),
        traffic=job.traffic,
        check=job.check,
        facts={"elements": inputs[0].numel()},
    )


def _dequantize(bench: Bench) -> Job:
    traffic = elementwise(bench.sizes.rows * bench.sizes.width, NVFP4, BF16)
    stored = [
        quantize(x, scheme=NVFP4_ROW_POW2, backend=bench.backend)
        for x in normal_inputs(bench, bench.sizes.rows, traffic)
    ]

    def values(t: BlockTensor, backend: Backend = bench.backend) -> Tensor:
        return dequantize(t, dtype=torch.bfloat16, backend=backend)

    plain = compiled(peers.dequantize_plainly, [(t.packed, t.scales()) for t in stored], traffic)
    return Job(
        ours=contender([lambda t=t: values(t) for t in stored], traffic),  # type: ignore[misc]
        theirs={COMPILED: plain},
        traffic=traffic,
        check=lambda outputs: same_bytes((outputs[0], values(stored[0], Backend.REFERENCE))),
    )


def _syndromes(bench: Bench) -> Job:
    code, width = syndrome_code(CODE), bench.sizes.width
    traffic = elementwise(bench.sizes.rows * width, 1, code.row_bytes(width) / width)
    generator = bench.generator(0)
    shape = (bench.sizes.rows, width)
    codes = [
        torch.randint(0, 16, shape, generator=generator, device=bench.device, dtype=torch.uint8)
        for _ in range(bench.sets(traffic.bytes))
    ]

    def check(outputs: list[Tensor]) -> Any:
        return same_bytes((outputs[0], encode_syndromes(codes[0], code=code, backend=Backend.REFERENCE)))

    calls = over(codes, lambda x: encode_syndromes(x, code=code, backend=bench.backend))
    return Job(ours=contender(calls, traffic), theirs={}, traffic=traffic, check=check)
