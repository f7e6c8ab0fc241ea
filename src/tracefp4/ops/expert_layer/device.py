"""expert_layer by kernels: routing lists, rounding of x, gate and up with SwiGLU, rounding of h, down, weighted sum.

Six launches (seven for more than 1,024 pairs), none of which asks the host: grids are bounds from shapes, blocks
without work end at once. h is rounded in a launch of its own, because the power of two of a row needs the row's
largest value, which blocks over all of I share; rounding inside the down-projection would repeat that work in each
of its blocks. With the rows' exponents known in advance (a static scheme) nothing changes but the search for the
maximum.

How the products are cut is said in `tilings.py`; every sum runs in a fixed order.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracefp4.formats.precision import LayerPrecision, Part
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.tensor import BlockTensor
from tracefp4.formats.weight_fragments import GROUP, WeightFragments, empty_fragments
from tracefp4.ops.device import DeviceLibrary, KernelFile, Launch, aligned
from tracefp4.ops.expert_layer.operands import ExpertOutput, Experts, Routing
from tracefp4.ops.expert_layer.reference import (
    combine_reference,
    down_reference,
    gate_up_reference,
    refit_reference,
    round_rows,
)
from tracefp4.ops.expert_layer.routes import LIST_THREADS, LISTS, Routes, sort_pairs, sorted_pairs
from tracefp4.ops.expert_layer.tilings import FEWEST, Tiling, cut_of, fewest_groups, tiling_of
from tracefp4.ops.kernels import DTYPE, first_difference
from tracefp4.ops.rules import SchemeCase

_HERE = Path(__file__).parent
_OWN_EXPONENT = 128
"""What rows.cu takes for "every row finds its own"."""
_ROW_THREADS, _REFIT_THREADS = 512, 256
_MANY_WARPS, _HELD_BLOCKS = 4096, 4
"""Beyond so many warps with a block of the scheme per thread, which fill a GPU, a thread takes several; see rows.cu."""
_COPYING_WARPS = 4
"""Of a block in piped.cu."""
_MAXIMA_PARTS = 32
"""Thread blocks that look for the maximum of one matrix."""


class Rows(NamedTuple):
    """Activations as products read them."""

    operand: Tensor
    """bfloat16 [N, K filled up to a multiple of 64]."""
    block_tensor: BlockTensor | None
    """Their bytes, if asked for."""
    in_steps: bool
    """Whether columns 16j + 2i and + 1 of a group of 64 lie at 8i + 2j and + 1: a product of piped.cu adds up sixteen
    neighbouring columns of the operand at a time, and lane j's columns are those of four such steps."""

    @property
    def values(self) -> Tensor:
        """The operand with its columns in order."""
        return _pairs_transposed(self.operand, 8) if self.in_steps else self.operand


class Steps(NamedTuple):
    """Everything that the layer computes, for tests and the check at first use."""

    x: Rows
    h: Tensor
    """bfloat16 [P, I], before it is rounded."""
    w2: Rows
    y_of_pairs: Tensor
    """bfloat16 [P, H]."""
    y: Tensor
    """bfloat16 [T, H]."""


def expert_layer_on_device(
    x: Tensor, routing: Routing, experts: Experts, precision: LayerPrecision, with_codes: bool
) -> ExpertOutput:
    """Compute checked operands; see `expert_layer`."""
    tiling = tiling_of(routing.ids.numel(), experts.gate_up.shape[0], x.device)
    steps = run_steps(x, routing, experts, precision, (tiling, with_codes))
    return ExpertOutput(steps.y, steps.x.block_tensor, steps.w2.block_tensor)


def run_steps(
    x: Tensor,
    routing: Routing,
    experts: Experts,
    precision: LayerPrecision,
    how: tuple[Tiling, bool],
) -> Steps:
    """Run all kernels under a tiling, with or without the bytes of both sites; return every result."""
    tiling, with_codes = how
    x, ids = x.detach(), routing.ids.contiguous()
    num_tokens, top_k = ids.shape
    hidden, inner = experts.gate_up.width, experts.down.width
    routes = sort_pairs(ids, experts.gate_up.shape[0], 8 * tiling.token_tiles)
    x_rows = _round_rows(x, precision, "x", with_codes, in_steps=tiling.in_steps)
    h = torch.empty((num_tokens * top_k, inner), dtype=torch.bfloat16, device=x.device)
    _multiply("gate_up", (x_rows.operand, routes, experts.gate_up), tiling, (inner, top_k, h))
    w2_rows = _round_rows(h, precision, "w2", with_codes, in_steps=tiling.in_steps)
    y_of_pairs = torch.empty((num_tokens * top_k, hidden), dtype=torch.bfloat16, device=x.device)
    _multiply("down", (w2_rows.operand, routes, experts.down), tiling, (hidden, y_of_pairs))
    y = torch.empty((num_tokens, hidden), dtype=torch.bfloat16, device=x.device)
    weights = routing.weights.detach().contiguous()
    LISTS.launch(
        Launch("combine", (num_tokens,), LIST_THREADS, {}),
        *(y_of_pairs, ids, weights, DTYPE[weights.dtype], experts.gate_up.shape[0]),
        *(top_k, hidden, y),
        device=x.device,
    )
    return Steps(x_rows, h, w2_rows, y_of_pairs, y)


class Case(NamedTuple):
    """What the kernels of a layer are specialised for; those of `refit` for a scheme alone."""

    weight: Scheme
    """Of the weights."""
    activation: Scheme | None
    """Of x and h."""
    tiling: Tiling
    """How the products are cut."""
    hidden: int
    """The fewest groups of 64 columns that take the kernels of x, and go around their stages where x does."""
    inner: int
    """The same of h."""

    def __str__(self) -> str:
        activation = "bf16" if self.activation is None else self.activation.name
        groups = f"{self.hidden} and {self.inner} groups"
        return f"{self.weight.name} weights, {activation} activations, {self.tiling}, {groups}"


def case_of(num_pairs: int, experts: Experts, activation: Scheme | None) -> Case:
    """Return the case of a layer for so many pairs."""
    tiling = tiling_of(num_pairs, experts.gate_up.shape[0], experts.gate_up.words.device)
    groups = (fewest_groups(tiling, part.words.shape[2]) for part in experts)
    return Case(experts.down.scheme, activation, tiling, *groups)


def refit_on_device(weights: Tensor, fragments: WeightFragments) -> None:
    """Quantize checked matrices into fragments; see `refit`."""
    weights = aligned(weights.resolve_neg())
    experts, rows, width = fragments.shape
    scheme, device = fragments.scheme, weights.device
    variant = _rows_variant(scheme)
    num_partial = _MAXIMA_PARTS if scheme.outer == "tensor" else 0
    partial = torch.empty((experts, num_partial), dtype=torch.float32, device=device)
    if num_partial:
        launch = Launch("matrix_maxima", (num_partial, experts), _REFIT_THREADS, variant)
        _ROWS.launch(launch, weights, rows * width // scheme.block_size, partial, device=device)
    elif scheme.outer == "none":
        fragments.exponents.zero_()
    num_items = prod(fragments.words.shape[1:3]) * 8 * (GROUP // scheme.block_size)
    launch = Launch("refit_matrices", (-(-num_items // _REFIT_THREADS), experts), _REFIT_THREADS, variant)
    operands = (weights, rows, width, partial, num_partial)
    _ROWS.launch(launch, *operands, fragments.exponents, fragments.words, fragments.scales, device=device)


def _round_rows(
    x: Tensor,
    precision: LayerPrecision,
    part: Part,
    with_codes: bool,
    *,
    in_steps: bool = False,
    many: bool | None = None,
) -> Rows:
    """Round rows; `many` overrules what their number asks for."""
    scheme, (num_rows, width) = precision.activation, x.shape
    padded = -(-width // GROUP) * GROUP
    if scheme is None:
        filled = x.resolve_neg() if padded == width else pad(x, (0, padded - width))
        return Rows(_pairs_transposed(filled, 4) if in_steps else aligned(filled), None, in_steps)
    x, device = aligned(x.resolve_neg()), x.device
    exponent = precision.exponent_of(part)
    values = torch.empty((num_rows, padded), dtype=torch.bfloat16, device=device)
    block_tensor = _empty_bytes(num_rows, width, scheme, exponent, device) if with_codes else None
    parts: tuple[Tensor | None, ...] = (None, None, None)
    if block_tensor is not None:
        parts = (block_tensor.packed, block_tensor.block_scales, block_tensor.outer)
    if many is None:
        many = num_rows * width > _MANY_WARPS * 32 * scheme.block_size
    kernel, held = ("quantize_many_rows", _HELD_BLOCKS) if many else ("quantize_few_rows", 1)
    threads = min(-(-width // (32 * scheme.block_size * held)) * 32, _ROW_THREADS)
    given = _OWN_EXPONENT if scheme.outer == "row" else exponent or 0
    launch = Launch(kernel, (num_rows,), threads, _rows_variant(scheme))
    _ROWS.launch(launch, x, width, padded, int(in_steps), given, values, *parts, device=device)
    return Rows(values, block_tensor, in_steps)


def _pairs_transposed(rows: Tensor, height: int) -> Tensor:
    """Take the 32 pairs of columns of every group as a matrix of that height, and transpose it."""
    pairs = rows.reshape(rows.shape[0], rows.shape[1] // GROUP, height, 32 // height, 2)
    return aligned(pairs.transpose(2, 3).reshape(rows.shape))


def _empty_bytes(
    num_rows: int, width: int, scheme: Scheme, exponent: int | None, device: torch.device
) -> BlockTensor:
    """A BlockTensor to be filled; its outer scale is written already unless every row has one."""
    if scheme.outer == "row":
        outer = torch.empty(num_rows, dtype=torch.int8, device=device)
    else:
        outer = torch.full((), exponent or 0, dtype=torch.int8, device=device)
    return BlockTensor(
        packed=torch.empty((num_rows, width // 2), dtype=torch.uint8, device=device),
        block_scales=torch.empty((num_rows, width // scheme.block_size), dtype=torch.uint8, device=device),
        outer=outer,
        scheme=scheme,
    )


def _rows_variant(scheme: Scheme) -> dict[str, int | str]:
    return SchemeCase(scheme, torch.bfloat16).defines


def _multiply(
    product: str,
    operands: tuple[Tensor, Routes, WeightFragments],
    tiling: Tiling,
    rest: tuple[Tensor | int, ...],
) -> None:
    """Launch `gate_up` or `down`; `rest` is what the kernel takes from the number of a part's rows on."""
    if tiling.kind == "piped":
        _multiply_piped(product, operands, tiling, rest)
        return
    x, routes, w = operands
    groups = w.words.shape[2]
    tiles_of_rows = w.words.shape[1] // (2 if product == "gate_up" else 1)
    row_tiles = tiling.row_tiles // (2 if product == "gate_up" else 1)
    (warps, stages), shared_bytes = cut_of(tiling, groups), 0
    if tiling.kind != "few":
        row_tiles *= warps
        of_warp = tiling.row_tiles * (512 + 16 * GROUP // w.scheme.block_size)
        shared_bytes = stages * (8 * tiling.token_tiles * (GROUP + 8) * 2 + warps * of_warp)
    defines = _defines(w, tiling, (warps, stages)) | {"MIN_BLOCKS": tiling.blocks}
    grid = (-(-tiles_of_rows // row_tiles), routes.tiles.shape[0])
    launch = Launch(f"{product}_{tiling.kind}", grid, 32 * warps, defines, shared_bytes)
    _PRODUCTS[tiling.kind].launch(
        launch, w.words, w.scales, w.exponents, x, *routes, groups, *rest, device=x.device
    )


def _multiply_piped(
    product: str,
    operands: tuple[Tensor, Routes, WeightFragments],
    tiling: Tiling,
    rest: tuple[Tensor | int, ...],
) -> None:
    """As `_multiply`: by blocks that take tile after tile."""
    x, routes, w = operands
    row_tiles, num_tiles = tiling.row_tiles * tiling.warps, routes.tiles.shape[0]
    of_row_tile = 512 + 16 * GROUP // w.scheme.block_size
    stage_bytes = -(-(8 * tiling.token_tiles * GROUP * 2 + row_tiles * of_row_tile) // 1024) * 1024
    blocks = num_tiles * -(-w.words.shape[1] // row_tiles)
    launch = Launch(
        f"{product}_piped",
        (min(blocks, _multiprocessors(x.device)),),
        32 * (tiling.warps + _COPYING_WARPS),
        _defines(w, tiling, (tiling.warps, tiling.stages)),
        1024 + tiling.stages * (stage_bytes + 16) + 16 + tiling.warps * 32 * 48,
    )
    parts = (w.words, w.scales, w.exponents, x, *routes, w.words.shape[2], *rest, num_tiles)
    _PRODUCTS["piped"].launch(launch, *parts, device=x.device)


def _defines(w: WeightFragments, tiling: Tiling, cut: tuple[int, int]) -> dict[str, int | str]:
    """The constants of fragments.cuh, and the warps and stages of a product."""
    numbers = (w.scheme.block_size, tiling.row_tiles, tiling.token_tiles, *cut)
    return dict(zip(("BLOCK", "NT", "MT", "WARPS", "STAGES"), numbers, strict=True))


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where it is emulated."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def differences(device: torch.device, case: Case | Scheme) -> str | None:
    """Compare a small layer with the reference, or `refit` under a scheme; return what differs, or None."""
    if isinstance(case, Scheme):
        weights = _wave(4 * 96 * 192, device).view(4, 96, 192)
        got, wanted = (empty_fragments(weights.shape, case, device) for _ in range(2))
        for fragments in (got, wanted):  # a static scheme keeps its exponents, which are 0
            fragments.exponents.zero_()
        refit_on_device(weights, got)
        refit_reference(weights, wanted)
        parts = ("words", "scales", "exponents")
        return first_difference(
            (f"{part} of weights", getattr(got, part), getattr(wanted, part)) for part in parts
        )
    experts, x = _small_layer(case, device)
    precision = LayerPrecision(
        activation=case.activation, weight=case.weight, kv=None, x_exponent=-8, w2_exponent=-8
    )
    pairs = torch.arange(2 * x.shape[0], device=device)
    ids = torch.where(pairs < pairs.numel() - 22, 0, pairs % 3).view(-1, 2)
    routing = Routing(ids, x.flatten()[: pairs.numel()].view(-1, 2))
    steps = run_steps(x, routing, experts, precision, (case.tiling, True))
    return (
        first_difference(sorted_pairs(device))
        or first_difference(_bytes_of_sites(x, steps, precision))
        or _far_from_reference(steps, routing, experts)
    )


def _small_layer(case: Case, device: torch.device) -> tuple[Experts, Tensor]:
    """Return four experts, one of them without tokens, and tokens: eleven, and where products take half a tile for few
    tokens, as many more as fill one."""
    num_tokens = 11 + (4 * case.tiling.token_tiles if case.tiling.in_steps else 0)
    hidden, inner, parts = case.hidden * GROUP, case.inner * GROUP, []
    for rows, width in ((2 * inner, hidden), (hidden, inner)):
        fragments = empty_fragments((4, rows, width), case.weight, device)
        fragments.exponents.zero_()
        refit_reference(_wave(4 * rows * width, device).view(4, rows, width), fragments)
        parts.append(fragments)
    return Experts(*parts), _wave(num_tokens * hidden, device).view(num_tokens, hidden)


def _wave(num_elements: int, device: torch.device) -> Tensor:
    angles = torch.arange(num_elements, dtype=torch.float64, device=device) * 1.7
    return angles.sin().to(torch.bfloat16)


def _bytes_of_sites(
    x: Tensor, steps: Steps, precision: LayerPrecision
) -> Iterator[tuple[str, Tensor, Tensor]]:
    parts: tuple[tuple[Part, Tensor, Rows], ...] = (("x", x, steps.x), ("w2", steps.h, steps.w2))
    for part, unrounded, rows in parts:
        rounded = round_rows(unrounded, precision, part)
        many = _round_rows(unrounded, precision, part, False, in_steps=rows.in_steps, many=True)
        yield f"values of {part} of many rows", many.values.to(torch.float32), rounded.values
        yield f"values of {part}", rows.values.to(torch.float32), rounded.values
        if rows.block_tensor is None or rounded.block_tensor is None:
            continue
        for name in ("packed", "block_scales", "outer"):
            yield f"{name} of {part}", getattr(rows.block_tensor, name), getattr(rounded.block_tensor, name)


def _far_from_reference(steps: Steps, routing: Routing, experts: Experts) -> str | None:
    """Compare every product with the reference's, given the operands that the kernels had; the orders of their sums
    differ, and with them the last bit of bf16."""
    ids, top_k = routing.ids.reshape(-1), routing.ids.shape[1]
    x, h = steps.x.values.float().repeat_interleave(top_k, 0), steps.w2.values.float()
    pairs = (
        ("h", steps.h, gate_up_reference(x, ids, experts.gate_up)),
        ("y of pairs", steps.y_of_pairs, down_reference(h, ids, experts.down)),
        ("y", steps.y, combine_reference(steps.y_of_pairs.float(), routing, experts)),
    )
    for name, got, wanted in pairs:
        allowed = wanted.abs() * 2.0**-6 + wanted.square().mean().sqrt() * 2.0**-12
        if not bool(((got.float() - wanted).abs() <= allowed).all()):
            return name
    return None


_USUAL = Case(NVFP4_TENSOR_POW2, NVFP4_ROW_POW2, FEWEST, 2, 2)
LIBRARY: DeviceLibrary[Case | Scheme] = DeviceLibrary(_HERE / "few.cu", differences, _USUAL)
"""Products of experts with few tokens; its check runs the kernels of all files."""
_MANY, _PIPED, _ROWS = (KernelFile(_HERE / name) for name in ("many.cu", "piped.cu", "rows.cu"))
_PRODUCTS: dict[str, KernelFile] = {"few": LIBRARY, "many": _MANY, "piped": _PIPED}
FILES = (*_PRODUCTS.values(), LISTS, _ROWS)
"""All of them; a runner has to be given to each."""
