"""sample by the kernels of head.cu and draw.cu: logits in bf16 with the weights of their tiles, then one draw per row.

Two launches for few rows, whose product takes the time of reading the head. For more rows torch multiplies, with
the library that is fastest at it, and a launch between the product and the draw finds the weights. Logits are kept,
in bf16, rather than computed again where a cut or a draw needs them: they are bf16 numbers by definition, N rows of
them have N / H of the head's bytes, and keys of 16 bits tell a threshold exactly from counts. A draw without cuts
reads 8 bytes for every 128 of them and then one tile.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tracefp4.ops.device import DeviceLibrary, KernelFile, Launch, aligned
from tracefp4.ops.kernels import first_difference
from tracefp4.ops.sample.operands import Draws, Sampled
from tracefp4.ops.sample.reference import draw, logits_reference

TILE = 128
"""Logits of a row that are looked at together; as in tiles.cuh."""
_FEW_ROWS, _STAGES, _DEPTH = 16, 4, 64
"""Rows of hidden states that a block multiplies, and its stages of so many columns in shared memory; as in head.cu."""
_HEAD_THREADS, _STRIP_TILES = 128, 32
_DRAW_THREADS = 512
Kind = Literal["few", "many"]
"""Who multiplies: the kernel of head.cu few rows, torch many. A row's logits are the same in every batch of few;
between the two kinds, and between batches of many, the last bits of the float32 sums that are rounded may
differ."""


class Logits(NamedTuple):
    """What head.cu leaves."""

    logits: Tensor
    """bfloat16 [N, tiles * TILE], -Inf beyond the vocabulary."""
    weights: Tensor
    """float32 [N, tiles, 2]: the largest logit of a tile, and the sum of exponentials below it."""


def sample_on_device(hidden: Tensor, head: Tensor, draws: Draws) -> Sampled:
    """Draw from checked operands; see `sample`."""
    found = logits_on_device(hidden, head, draws.temperature, kind_of(len(hidden)))
    return draw_on_device(found, head.shape[0], draws)


def kind_of(num_rows: int) -> Kind:
    """Return who multiplies so many rows."""
    return "few" if num_rows <= _FEW_ROWS else "many"


def logits_on_device(hidden: Tensor, head: Tensor, temperature: Tensor, kind: Kind) -> Logits:
    """Multiply checked operands; both kinds take any number of rows."""
    hidden, head = aligned(hidden.detach().resolve_neg()), aligned(head.detach().resolve_neg())
    (num_rows, width), vocabulary, device = hidden.shape, head.shape[0], hidden.device
    tiles = -(-vocabulary // TILE)
    found = Logits(
        torch.empty((num_rows, tiles * TILE), dtype=torch.bfloat16, device=device),
        torch.empty((num_rows, tiles, 2), dtype=torch.float32, device=device),
    )
    if kind == "many":
        torch.mm(hidden, head.T, out=found.logits[:, :vocabulary])
        launch = Launch("weigh_tiles", (num_rows, -(-tiles // _STRIP_TILES)), _HEAD_THREADS, {})
        HEAD.launch(launch, temperature.contiguous(), tiles, vocabulary, *found, device=device)
        return found
    launch = Launch(
        "multiply_head",
        (-(-num_rows // _FEW_ROWS), tiles),
        _HEAD_THREADS,
        {},
        _STAGES * (TILE + _FEW_ROWS) * _DEPTH * head.element_size(),
    )
    operands = (head, hidden, temperature.contiguous(), num_rows, vocabulary, width)
    HEAD.launch(launch, *operands, *found, device=device)
    return found


def draw_on_device(found: Logits, vocabulary: int, draws: Draws) -> Sampled:
    """Draw from what head.cu left."""
    num_rows, tiles, _ = found.weights.shape
    device = found.weights.device
    forced = None if draws.forced is None else draws.forced.contiguous()
    columns = (draws.keys, draws.positions, draws.temperature, draws.top_k, draws.top_p)
    mass = torch.empty((num_rows, tiles), dtype=torch.int64, device=device)
    ties = torch.empty((num_rows, tiles), dtype=torch.int32, device=device)
    sampled = Sampled(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.float64, device=device),
    )
    launch = Launch("draw_tokens", (num_rows,), _DRAW_THREADS, {"THREADS": _DRAW_THREADS})
    operands = (*found, tiles, vocabulary, *(column.contiguous() for column in columns), forced)
    LIBRARY.launch(launch, *operands, mass, ties, *sampled, device=device)
    return sampled


def differences(device: torch.device, kind: Kind) -> str | None:
    """Compare with the reference on logits that are exact in any order of sums; return what differs, or None."""
    return first_difference(_pairs(device, kind))


def _pairs(device: torch.device, kind: Kind) -> Iterator[tuple[str, Tensor, Tensor]]:
    hidden, head, draws = check_operands(device)
    wanted = logits_reference(hidden, head)
    sampled = draw(wanted, draws)
    found = logits_on_device(hidden, head, draws.temperature, kind)
    yield "logits", found.logits[:, : head.shape[0]].to(torch.float32), wanted
    got = draw_on_device(found, head.shape[0], draws)
    yield "tokens", got.tokens, sampled.tokens
    is_far = (got.logprobs - sampled.logprobs).abs() > TOLERANCE
    yield "log-probabilities", is_far | got.logprobs.isnan(), torch.zeros_like(is_far)


TOLERANCE = 1e-5
"""Of a log-probability: sums of exponentials are float32, exponentials have two units in the last place."""


def check_operands(device: torch.device) -> tuple[Tensor, Tensor, Draws]:
    """Return hidden states [24, 72], a head [300, 72] and draws of every kind; products are small multiples of 1/16."""
    rows, vocabulary, width = 24, 300, 72
    hidden = (torch.arange(rows * width, device=device) * 37 % 101 % 17 - 8).view(rows, width)
    head = (torch.arange(vocabulary * width, device=device) * 53 % 211 % 13 - 6).view(vocabulary, width)
    index = torch.arange(rows, device=device)
    draws = Draws(
        keys=index * 0x5851F42D4C957F2D,
        positions=index * 3,
        temperature=torch.tensor([1.0, 0.7, 0.0, 3.0], dtype=torch.float64, device=device).repeat(6),
        top_k=torch.tensor([0, 5, 40], device=device).repeat(8),
        top_p=torch.tensor([1.0, 0.9, 0.4], dtype=torch.float64, device=device).repeat_interleave(8),
        forced=torch.where(index % 6 == 5, torch.zeros_like(index), torch.full_like(index, -1)),
    )
    return hidden.to(torch.bfloat16) / 4.0, head.to(torch.bfloat16) / 16.0, draws


HEAD = KernelFile(Path(__file__).with_name("head.cu"))
"""The kernels of head.cu."""
LIBRARY: DeviceLibrary[Kind] = DeviceLibrary(Path(__file__).with_name("draw.cu"), differences, "few")
"""The kernel of draw.cu; its check covers head.cu, too."""
