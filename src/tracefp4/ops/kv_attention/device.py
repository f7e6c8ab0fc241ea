"""kv_attention by the kernels of kernel.cu: decoding and prefill over FP4 pages in fragment order, or bf16 pages.

What a query gets is the same, bit for bit, in every batch, chunk and run: how many splits a thread block takes is
decided from shapes and changes no operation on its numbers.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import e, log2
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from tracefp4.formats.fragments import HEAD_DIM_STEP, TILE_TOKENS, FragmentPages, to_fragments
from tracefp4.formats.schemes import NVFP4_KV
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.device import DeviceLibrary, Launch, aligned
from tracefp4.ops.kernels import DTYPE
from tracefp4.ops.kv_attention.reference import attend_reference
from tracefp4.ops.pages import LayerPages, Pages

MAX_HEAD_DIM = 256
SCOPE = (
    "queries in bf16, fp16 or float32; K and V both FP4 in fragment order or both bf16; head dims "
    f"{HEAD_DIM_STEP}, 128, 192, {MAX_HEAD_DIM}; pages of {TILE_TOKENS} tokens or a multiple"
)
SPLIT_TOKENS = {64: 2048, 128: 2048, 192: 1024, MAX_HEAD_DIM: 1024}
"""Tokens whose sums are kept apart, by head dim: the same for every batch, so that no batch changes the order of
additions."""
_ENOUGH_BLOCKS = 1056
"""Thread blocks that fill a large GPU twice over, four on a multiprocessor; beyond them, blocks take several splits
each."""
_WARPS = 4
_SHARED_BYTES = {True: 54 << 10, False: 96 << 10}
"""Shared memory for tiles on their way, for FP4 and for bf16: three or four blocks fit on a multiprocessor, or two."""
_MAX_STAGES = 4
ROUNDED = 3.05 * 2.0**-8
"""Largest error, in units of (sum of p |v|) / (sum of p), where probabilities and results are rounded to bf16: 2^-8 of
every weight, as much of their sum, and as much of the result; the rest is for float32 sums and exponentials."""

EXACT = 2.0**-18
"""The same where neither is rounded."""
_RESULT_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}


def is_covered(queries: Tensor, pages: LayerPages) -> bool:
    """Return whether the kernels take these operands; `SCOPE` says it in words."""
    keys, values = pages.keys, pages.values
    if isinstance(keys, FragmentPages) and isinstance(values, FragmentPages):
        stored: tuple[Tensor, ...] = (keys.packed, values.packed, keys.block_scales, values.block_scales)
        page_size, head_dim = keys.packed.shape[2], keys.packed.shape[3] * 2
    elif (
        isinstance(keys, Tensor)
        and isinstance(values, Tensor)
        and keys.dtype == values.dtype == torch.bfloat16
    ):
        stored = keys, values
        page_size, head_dim = keys.shape[2:]
    else:
        return False
    fits = page_size % TILE_TOKENS == 0 and head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM
    return fits and queries.dtype in DTYPE and all(part.is_contiguous() for part in stored)


def attend_on_device(
    queries: Tensor,
    pages: LayerPages,
    *,
    page_table: Tensor,
    positions: Tensor,
    rounds_probabilities: bool,
    enough_blocks: int = _ENOUGH_BLOCKS,
) -> Tensor:
    """Attend with checked operands that `is_covered`; see `kv_attention`.

    Args:
        queries: As there, as what follows.
        pages: K and V.
        page_table: Frames.
        positions: Of the queries.
        rounds_probabilities: Apply R.
        enough_blocks: How many thread blocks to aim at, at least 1; it changes no bit.
    """
    stored = _stored(pages)
    num_kv, num_frames, page_size, head_dim = stored.size
    queries, out = aligned(queries), torch.empty_like(queries, memory_format=torch.contiguous_format)
    num_seqs, num_queries, num_heads, _ = queries.shape
    num_columns = num_queries * (num_heads // num_kv)
    defines = case_of(queries, pages, rounds_probabilities).defines
    tiles = (num_seqs * num_kv, -(-num_columns // (8 * int(defines["NT"]))))
    num_splits = -(-page_table.shape[1] * page_size // SPLIT_TOKENS[head_dim])
    most_splits = max(1, min(num_splits, tiles[0] * tiles[1] * num_splits // enough_blocks))
    block_splits = -(-num_splits // -(-num_splits // most_splits))  # as even as can be
    partial = sums = None
    if block_splits < num_splits:
        size = (num_seqs * num_kv, num_splits, num_columns)
        partial = torch.empty((*size, head_dim), dtype=torch.float32, device=queries.device)
        sums = torch.empty((*size, 2), dtype=torch.float32, device=queries.device)
    table, positions = page_table.contiguous(), positions.contiguous()
    heads = (num_queries, num_heads // num_kv, num_kv)
    sizes = (page_table.shape[1], num_splits, block_splits, num_frames, page_size // TILE_TOKENS)
    scale = head_dim**-0.5 * log2(e)
    grid = (*tiles, -(-num_splits // block_splits))
    launch = Launch("attend", grid, 32 * _WARPS, defines, _shared(defines))
    operands = (queries, *stored.parts, table, positions, out, partial, sums)
    LIBRARY.launch(launch, *operands, *heads, *sizes, *stored.exponents, scale, device=queries.device)
    if partial is not None:
        launch = Launch("combine", (tiles[0], num_columns), head_dim, defines)
        operands = (partial, sums, positions, out)
        LIBRARY.launch(launch, *operands, *heads, num_splits, stored.exponents[1], device=queries.device)
    return out


class Case(NamedTuple):
    """What kernel.cu is specialised for."""

    dtype: torch.dtype
    """Of the queries."""
    head_dim: int
    """D."""
    is_fp4: bool
    """Whether pages hold FP4; their operands are fp16, otherwise bf16."""
    rounds: bool
    """Whether probabilities are rounded to bf16."""
    tiles: int
    """Tiles of 8 columns, pairs (query, query head), that a thread block takes."""

    @property
    def defines(self) -> dict[str, int | str]:
        """The constants of kernel.cu."""
        ring_bytes = _WARPS * _tile_bytes(self.head_dim, is_fp4=self.is_fp4)
        return {
            "HEAD_DIM": self.head_dim,
            "IS_FP4": int(self.is_fp4),
            "QUERY": DTYPE[self.dtype],
            "QUERY_PARTS": _query_parts(self.dtype, is_fp4=self.is_fp4),
            "PROBABILITY_PARTS": 1 if self.rounds else 2 if self.is_fp4 else 3,
            "ROUNDS": int(self.rounds),
            "SPLIT": SPLIT_TOKENS[self.head_dim],
            "NT": self.tiles,
            "WARPS": _WARPS,
            "MIN_BLOCKS": _min_blocks(self),
            "STAGES": max(2, min(_MAX_STAGES, _SHARED_BYTES[self.is_fp4] // ring_bytes)),
        }


def case_of(queries: Tensor, pages: LayerPages, rounds_probabilities: bool) -> Case:
    """Return the case of operands that `is_covered`."""
    num_kv, _, _, head_dim = _stored(pages).size
    is_fp4 = isinstance(pages.keys, FragmentPages)
    num_columns = queries.shape[1] * (queries.shape[2] // num_kv)
    # as many columns as registers hold the sums of
    most = 1 if _query_parts(queries.dtype, is_fp4=is_fp4) > 1 else 4 if head_dim == HEAD_DIM_STEP else 2
    tiles = 1 if num_columns <= 8 else min(2, most) if num_columns <= 16 else most
    return Case(queries.dtype, head_dim, is_fp4, rounds_probabilities, tiles)


def _min_blocks(case: Case) -> int:
    """Return how many thread blocks a multiprocessor has room for: with registers for one after the other, the
    latency of products and conversions shows."""
    is_decoding = case.is_fp4 and case.tiles == 1 and case.dtype == torch.bfloat16
    if not is_decoding:
        return 1
    return 4 if case.head_dim <= 128 else 3


def _query_parts(dtype: torch.dtype, *, is_fp4: bool) -> int:
    """Return how many fp16 (11 bits) or bf16 (8 bits) numbers hold a query."""
    return {torch.bfloat16: 1, torch.float16: 1 if is_fp4 else 2, torch.float32: 2 if is_fp4 else 3}[dtype]


def _shared(defines: Mapping[str, int | str]) -> int:
    """Return the dynamic shared memory of `attend`: the tiles on their way, and `struct merged`."""
    head_dim, tiles, warps, stages = (int(defines[name]) for name in ("HEAD_DIM", "NT", "WARPS", "STAGES"))
    columns = 8 * tiles
    ring = warps * stages * _tile_bytes(head_dim, is_fp4=bool(defines["IS_FP4"]))
    exchanged = (64 if defines["IS_FP4"] else head_dim // 4) + 4
    return ring + 4 * columns * (warps * exchanged + head_dim + 3 * warps + 7)


def _tile_bytes(head_dim: int, *, is_fp4: bool) -> int:
    """Bytes of K and V of 16 tokens."""
    return 2 * TILE_TOKENS * (head_dim * 9 // 16 if is_fp4 else head_dim * 2)


class _Stored(NamedTuple):
    """Pages as the kernel takes them."""

    parts: tuple[Tensor | None, ...]
    """Codes or values and scales of K, then of V."""
    exponents: tuple[int, int]
    """Outer exponents of K and V."""
    size: tuple[int, ...]
    """C, F, S, D."""
    is_fp4: bool
    """Whether there are codes."""


def _stored(pages: LayerPages) -> _Stored:
    keys, values = pages.keys, pages.values
    if isinstance(keys, FragmentPages) and isinstance(values, FragmentPages):
        parts = (keys.packed, keys.block_scales, values.packed, values.block_scales)
        size = (*keys.packed.shape[:3], 2 * keys.packed.shape[3])
        return _Stored(parts, (int(keys.outer), int(values.outer)), size, True)
    assert isinstance(keys, Tensor) and isinstance(values, Tensor), "the caller asks is_covered first"
    return _Stored((keys, None, values, None), (0, 0), tuple(keys.shape), False)


def differences(device: torch.device, case: Case) -> str | None:
    """Compare attention over pages of one kind with the reference; return what differs, or None."""
    generator, split = torch.Generator("cpu").manual_seed(0), SPLIT_TOKENS[case.head_dim]
    num_frames = split // TILE_TOKENS + 8  # two splits, which are combined
    table = torch.randperm(num_frames, generator=generator, device="cpu").expand(2, num_frames).to(device)
    positions = torch.tensor([[split + 87], [70]], device=device)
    size = (2, 1, 2 * 8 * case.tiles, case.head_dim)
    queries = torch.randn(size, generator=generator, device="cpu").to(device, case.dtype)
    where = Where(page_table=table, positions=positions)
    found = sample_pages(generator, is_fp4=case.is_fp4, head_dim=case.head_dim, num_frames=num_frames)
    pages, magnitudes = (_moved(part, device) for part in found)
    got, again = (
        attend_on_device(queries, pages, **where, rounds_probabilities=case.rounds, enough_blocks=enough)
        for enough in (_ENOUGH_BLOCKS, 1)
    )
    # results are rounded to the dtype of the queries, whatever happens to probabilities
    allowed = ROUNDED if case.rounds else EXACT + _RESULT_ROUNDING[case.dtype]
    if not error_of(got, queries, (pages, magnitudes), where) <= allowed:  # NaN is none
        return "results"
    return None if torch.equal(got, again) else "results in another grid"


class Where(TypedDict):
    """Which tokens are attended to."""

    page_table: Tensor
    positions: Tensor


def error_of(got: Tensor, queries: Tensor, pages: tuple[LayerPages, LayerPages], where: Where) -> float:
    """Return the largest error of a result in units of (sum of p |v|) / (sum of p), against float64; NaN if it has any.

    Args:
        got: [B, Q, H, D].
        queries: Of the same shape.
        pages: As `sample_pages` returns them.
        where: Tables and positions.
    """
    exact, unit = (
        attend_reference(queries.double(), part, **where, rounds_probabilities=False) for part in pages
    )
    error = (got.double() - exact).abs()
    return float((error / unit).masked_fill(error == 0, 0.0).max())


def sample_pages(
    generator: torch.Generator, *, is_fp4: bool, head_dim: int, num_frames: int
) -> tuple[LayerPages, LayerPages]:
    """Return random pages of 2 kv heads and 16 tokens a page, and the same with the magnitudes of V.

    Attention over the latter is the sum of p |v| over the sum of p, in units of which results are compared.
    """
    size = (2, num_frames, TILE_TOKENS)
    if not is_fp4:
        k, v = (torch.randn(*size, head_dim, generator=generator, device="cpu").bfloat16() for _ in range(2))
        return LayerPages(keys=k, values=v), LayerPages(keys=k, values=v.abs())

    def drawn(exponent: int) -> BlockTensor:
        shapes = (*size, head_dim // 2), (*size, head_dim // 16)
        codes, scales = (
            torch.randint(0, limit, shape, generator=generator, device="cpu").to(torch.uint8)
            for limit, shape in zip((256, 57), shapes, strict=True)
        )
        outer = torch.tensor(exponent, dtype=torch.int8, device="cpu")
        return BlockTensor(packed=codes, block_scales=scales, outer=outer, scheme=NVFP4_KV)

    keys, values = to_fragments(drawn(-1), "k"), to_fragments(drawn(-3), "v")
    without_signs = replace(values, packed=values.packed & 0x3F)  # signs are the upper bits
    return LayerPages(keys=keys, values=values), LayerPages(keys=keys, values=without_signs)


def _moved(pages: LayerPages, device: torch.device) -> LayerPages:
    def moved(part: Pages) -> Pages:
        if isinstance(part, Tensor):
            return part.to(device)
        return replace(part, packed=part.packed.to(device), block_scales=part.block_scales.to(device))

    return LayerPages(keys=moved(pages.keys), values=moved(pages.values))


LIBRARY = DeviceLibrary(
    Path(__file__).with_name("kernel.cu"),
    differences,
    Case(torch.bfloat16, 128, is_fp4=True, rounds=True, tiles=1),
    scope=SCOPE,
)
"""The kernels of kernel.cu."""
