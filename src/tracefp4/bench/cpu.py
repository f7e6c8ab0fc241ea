"""`tracefp4 bench cpu`: quantize and pack, dequantize, guided rounding and packing, on this processor.

One job is one figure: our op under one scheme, and who is compared. The limit of a job is this run's copy bandwidth
(read + write of a tensor of the same size) over the bytes that the job must read and write per element. Where a peer's
bytes are claimed to be ours, they are compared before anything is timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench import peers
from tracefp4.bench.clock import best_seconds
from tracefp4.bench.row import BenchRow, Machine, describe_machine
from tracefp4.errors import ParityError
from tracefp4.formats import MXFP4_FLOOR, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, Scheme, scheme_by_name
from tracefp4.formats.packing import pack_codes, unpack_codes
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Guide, guided_quantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.quantize.compiled import pack_codes_compiled

UNIT = "Melem/s"
OUTPUT_BYTES = 0.5 + 1 / 16
"""Packed codes and E4M3 block scales, per element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure to measure."""

    id: str
    """Stable name."""
    ours: Callable[[], object]
    """Our contender."""
    backend: Backend
    """Which implementation it runs."""
    peer: str
    """Who is compared."""
    theirs: peers.Contender | None
    """Their contender; None when the library is not installed."""
    bytes_per_element: float
    """Read and written by an implementation that touches memory once."""


def run_cpu(
    *, rows: int = 4096, width: int = 4096, rounds: int = 5, on_row: Callable[[BenchRow], None] | None = None
) -> list[BenchRow]:
    """Measure every job.

    Args:
        rows: Rows of the matrix.
        width: Its columns, a multiple of 32.
        rounds: Rounds of each comparison.
        on_row: Called with each row as it is measured.

    Returns:
        One row per job, in the order measured.

    Raises:
        ParityError: Bytes that should be equal are not; nothing is timed then.
    """
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    machine, copy = describe_machine(), _copy_bandwidth(x, rounds=rounds)
    found = []
    for job in _jobs(x):
        row = _measure(job, elements=x.numel(), copy_bytes_per_s=copy, rounds=rounds, machine=machine)
        found.append(row)
        if on_row is not None:
            on_row(row)
    return found


def _measure(job: Job, *, elements: int, copy_bytes_per_s: float, rounds: int, machine: Machine) -> BenchRow:
    contenders: dict[str, Callable[[], object]] = {"ours": job.ours}
    if job.theirs is not None:
        contenders["theirs"] = job.theirs
    seconds = best_seconds(contenders, rounds=rounds)
    version = machine.versions.get(job.peer)
    return BenchRow(
        id=job.id,
        metric="throughput",
        value=elements / seconds["ours"] / 1e6,
        unit=UNIT,
        backend=job.backend.value,
        peer=f"{job.peer} {version}" if version else job.peer,
        peer_value=elements / seconds["theirs"] / 1e6 if job.theirs is not None else None,
        limit=copy_bytes_per_s / job.bytes_per_element / 1e6,
        machine=machine,
    )


def _copy_bandwidth(x: Tensor, *, rounds: int) -> float:
    """Bytes read and written per second by a copy between two tensors that exist already."""
    target = torch.empty_like(x)
    return 2 * x.numel() * x.itemsize / best_seconds({"copy": lambda: target.copy_(x)}, rounds=rounds)["copy"]


def _jobs(x: Tensor) -> Iterator[Job]:
    yield from _quantize_jobs(x)
    yield from _dequantize_jobs(x)
    yield from _guided_jobs(x)
    yield from _packing_jobs(x)


def _quantize_jobs(x: Tensor) -> Iterator[Job]:
    torchao = peers.torchao_quantize(x)
    best, half = choose("quantize", "cpu"), x.bfloat16()
    torchao_scheme = scheme_by_name("NVFP4_TORCHAO")
    if torchao is not None:
        _check_equal(x, torchao_scheme, torchao)
    for scheme in (NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, torchao_scheme):
        yield Job(
            id=f"cpu.quantize.{scheme.name}.float32",
            ours=lambda scheme=scheme: quantize(x, scheme=scheme),  # type: ignore[misc]
            backend=best,
            peer="torchao",
            theirs=torchao,
            bytes_per_element=4 + OUTPUT_BYTES,
        )
    yield Job(
        id="cpu.quantize.NVFP4_ROW_POW2.bfloat16",
        ours=lambda: quantize(half, scheme=NVFP4_ROW_POW2),
        backend=best,
        peer="torchao",
        theirs=peers.torchao_quantize(half),
        bytes_per_element=2 + OUTPUT_BYTES,
    )
    yield Job(
        id="cpu.quantize.MXFP4_FLOOR.float32",
        ours=lambda: quantize(x, scheme=MXFP4_FLOOR),
        backend=best,
        peer="torchao",
        theirs=peers.torchao_mx_quantize(x),
        bytes_per_element=4 + 0.5 + 1 / 32,
    )
    for peer, theirs in (("torchao", torchao), ("plain torch", peers.plain_quantize(x))):
        yield Job(
            id=f"cpu.quantize.NVFP4_ROW_POW2.float32.eager.{peer.replace(' ', '_')}",
            ours=lambda: quantize(x, scheme=NVFP4_ROW_POW2, backend=Backend.REFERENCE),
            backend=Backend.REFERENCE,
            peer=peer,
            theirs=theirs,
            bytes_per_element=4 + OUTPUT_BYTES,
        )


def _dequantize_jobs(x: Tensor) -> Iterator[Job]:
    t, best = quantize(x, scheme=NVFP4_ROW_POW2), choose("dequantize", "cpu")
    torchao = peers.torchao_dequantize(x)
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        yield Job(
            id=f"cpu.dequantize.NVFP4_ROW_POW2.{str(dtype).removeprefix('torch.')}",
            ours=lambda dtype=dtype: dequantize(t, dtype=dtype),  # type: ignore[misc]
            backend=best,
            peer="torchao",
            theirs=torchao,
            bytes_per_element=width + OUTPUT_BYTES,
        )
    buffer = torch.empty_like(x)
    yield Job(
        id="cpu.dequantize.NVFP4_ROW_POW2.float32.into_a_buffer",
        ours=lambda: dequantize(t, out=buffer),
        backend=best,
        peer="torchao",
        theirs=torchao,
        bytes_per_element=4 + OUTPUT_BYTES,
    )
    plain = peers.plain_dequantize(t.packed, t.scales())
    for peer, theirs in (("torchao", torchao), ("plain torch", plain)):
        yield Job(
            id=f"cpu.dequantize.NVFP4_ROW_POW2.float32.eager.{peer.replace(' ', '_')}",
            ours=lambda: dequantize(t, backend=Backend.REFERENCE),
            backend=Backend.REFERENCE,
            peer=peer,
            theirs=theirs,
            bytes_per_element=4 + OUTPUT_BYTES,
        )
    yield Job(
        id="cpu.dequantize.NVFP4_ROW_POW2.float32.compressed_tensors",
        ours=lambda: dequantize(t),
        backend=best,
        peer="compressed-tensors",
        theirs=peers.compressed_tensors_unpack(t.packed),
        bytes_per_element=4 + OUTPUT_BYTES,
    )


def _guided_jobs(x: Tensor) -> Iterator[Job]:
    """Rollout values, slightly moved, follow the record of the original: what a trainer does in each forward."""
    recorded = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    assert recorded.codes is not None
    everywhere = torch.ones(x.shape[0], dtype=torch.bool)
    moved = x * (1 + 2.0**-9)
    outer, scales, bits = recorded.outer, recorded.block_scales, recorded.codes & 1
    full = Guide(valid=everywhere, outer=outer, block_scales=scales, codes=recorded.codes, bits=None)
    cell = Guide(valid=everywhere, outer=outer, block_scales=scales, codes=None, bits=bits)
    plain = peers.plain_fake_quantize(x, quantize(x, scheme=NVFP4_ROW_POW2).scales())
    for name, guide, extra in (("live", None, 0.0), ("full", full, 1.0), ("nearest_cell", cell, 1.0)):
        for backend in dict.fromkeys((choose("guided_quantize", "cpu"), Backend.REFERENCE)):
            suffix = ".eager" if backend is Backend.REFERENCE else ""
            yield Job(
                id=f"cpu.guided_quantize.{name}.float32{suffix}",
                ours=lambda guide=guide, backend=backend: guided_quantize(  # type: ignore[misc]
                    moved, scheme=NVFP4_ROW_POW2, guide=guide, with_codes=False, backend=backend
                ),
                backend=backend,
                peer="plain torch",
                theirs=plain,
                bytes_per_element=8 + extra + 1 / 16,
            )


def _packing_jobs(x: Tensor) -> Iterator[Job]:
    t = quantize(x, scheme=NVFP4_ROW_POW2)
    codes, best = unpack_codes(t.packed), choose("quantize", "cpu")
    grid = dequantize(t, backend=Backend.REFERENCE).unflatten(-1, (-1, 16)) / t.scales().unsqueeze(-1)
    if not torch.equal(pack_codes(codes), t.packed):
        raise ParityError(
            "Packing the unpacked codes gives other bytes; got a difference. Report this as a defect."
        )
    pack = pack_codes_compiled if best is Backend.COMPILED else pack_codes
    compressed_tensors = peers.compressed_tensors_pack(grid.flatten(-2))
    for peer, theirs in (
        ("compressed-tensors", compressed_tensors),
        ("plain torch", peers.plain_pack(codes)),
    ):
        yield Job(
            id=f"cpu.pack.{peer.replace(' ', '_').replace('-', '_')}",
            ours=lambda: pack(codes),
            backend=best,
            peer=peer,
            theirs=theirs,
            bytes_per_element=1.5,
        )


def _check_equal(x: Tensor, scheme: Scheme, theirs: Callable[[], Any]) -> None:
    """Compare with what a peer stores; raise before a wrong figure is printed."""
    block_scales, packed = theirs()
    ours = quantize(x, scheme=scheme)
    is_equal = torch.equal(ours.packed, packed.view(torch.uint8).view_as(ours.packed))
    if not is_equal or not torch.equal(
        ours.block_scales, block_scales.view(torch.uint8).view_as(ours.block_scales)
    ):
        raise ParityError(
            f"{scheme.name} does not give the bytes of its library; got a difference on {tuple(x.shape)} normal "
            "values. The installed version may round in another order. Install the versions of constraints.txt."
        )
