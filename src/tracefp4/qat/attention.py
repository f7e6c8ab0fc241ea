"""The trainer's attention over K and V exactly as an FP4 cache would hold them.

K (after RoPE) and V are rounded per token and head before any query reads them, so a full-sequence training
pass and a token-by-token rollout compute the same function. Order of operations ("full row"):
a = R(R(softmax(q k^T * scale)) v), R = bf16 rounding; a real engine splits the row and rounds the
unnormalised probabilities per split, and that difference in order is the mismatch that guidance absorbs.
In native bf16 the attention itself is torch's, in the order of its kernels, which never holds a row of scores.
Where a sequence is split over ranks, the codes of keys and values are gathered before any query reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats import LayerPrecision, Scheme
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.guidance import Site, round_site
from tracefp4.guidance.record import SiteKind
from tracefp4.ops.guided_quantize import Rounded
from tracefp4.ops.upload import upload
from tracefp4.qat.opaque import opaque
from tracefp4.qat.ste import round_bf16_through, straight_through

ATTENTION_NAME = "tracefp4"


class SequencePart(Protocol):
    """Columns of a batch whose other columns are on other ranks; see `context_parallel.SequenceShard`."""

    def gather(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """Return all columns of a tensor that has this rank's, in their order."""

    def gather_rounded(self, x: Tensor, rounded: Rounded, scheme: Scheme) -> Tensor:
        """Return all columns of K or V [B, H, T here, D] at the values of the codes; the gradient of x's part."""

    def hidden_keys(self, device: torch.device) -> Tensor:
        """Return bool [B, 1, T here, T], True where a query may not look."""


@dataclass(frozen=True)
class SiteSettings:
    """What one attention module needs to round its keys and values."""

    layer: int
    """Index of the decoder layer; part of the site's name."""
    precision: LayerPrecision
    """`kv` None means that keys and values stay bf16."""
    arithmetic: Arithmetic
    """How the numbers around the quantizers are computed."""
    observer: Callable[[Site, Tensor], None] | None = None
    """Called with every K and V [B * T, Hkv * D], which then stay unrounded (calibration); None in training."""
    sequence: SequencePart | None = None
    """The part of the sequence that this pass computes; None: all of it."""


def cached(x: Tensor, settings: SiteSettings, kind: SiteKind) -> Tensor:
    """Return K or V [B, Hkv, T, D] as the cache holds it, of all columns, gradient straight-through."""
    precision, part = settings.precision, settings.sequence
    if settings.arithmetic.emulates_bf16:
        x = round_bf16_(x)
    if precision.kv is None and settings.observer is None:
        return x if part is None else part.gather(x, dim=2)
    num_batch, num_heads, num_tokens, head_dim = x.shape
    flat = x.detach().transpose(1, 2).reshape(num_batch * num_tokens, num_heads * head_dim)
    site = Site(kind=kind, layer=settings.layer)
    if settings.observer is not None:
        settings.observer(site, flat)
        return x if part is None else part.gather(x, dim=2)
    assert precision.kv is not None
    rounded = round_site(
        flat,
        site=site,
        scheme=precision.kv,
        exponent=precision.exponent_of(kind),
        with_codes=part is not None,
    )
    if part is not None:
        return part.gather_rounded(x, rounded, precision.kv)
    values = rounded.values.view(num_batch, num_tokens, num_heads, head_dim).transpose(1, 2)
    return straight_through(x, values)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segment_lengths: Sequence[int] | None = None,
    is_causal_row: bool = False,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attend over rounded keys and values; the signature is transformers' attention interface.

    Args:
        module: the attention module, with `tracefp4` (SiteSettings) set.
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D], after QK-norm and RoPE.
        attention_mask: additive [B, 1, T, T] (transformers' eager mask), or None for plain causal. Not read where the
            sequence is split (the shard's positions make the mask), packed with `segment_lengths`, or `is_causal_row`.
        scaling: multiplies the scores; 1 / sqrt(D) when None.
        dropout: must be 0; a recorded rollout has no dropout to follow.
        segment_lengths: the columns hold several sequences of these lengths, one after another, and each attends
            within itself: T_1^2 + T_2^2 + ... scores instead of T^2, the bytes of every sequence alone. A packed row
            without them needs a mask that keeps its sequences apart, as transformers makes it from positions that
            restart. None: every row is one sequence.
        is_causal_row: every row is one sequence from its first column on, padded on its right at most: plain causal
            attention then gives its tokens what a mask would, and padding whatever it gives.
        unused: what transformers passes to every implementation (window, cache arguments).

    Returns:
        ([B, T, Hq, D], None).

    Raises:
        ConfigError: dropout is not 0; segments that do not add up to T, or of a sequence that is split over ranks.
    """
    if dropout:
        raise ConfigError(
            f"attention dropout {dropout} is refused: a rollout has none. Only 0 is allowed. Set the model "
            "config's attention_dropout to 0."
        )
    settings: SiteSettings = module.tracefp4  # type: ignore[assignment]
    if segment_lengths is not None:
        _check_segments(segment_lengths, num_tokens=query.shape[2], settings=settings)
    emulates = settings.arithmetic.emulates_bf16
    q = round_bf16_(query) if emulates else query
    k, v = cached(key, settings, "k"), cached(value, settings, "v")
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if settings.arithmetic.dtype == "bfloat16" and settings.sequence is None:
        mask = None if is_causal_row or segment_lengths is not None else attention_mask
        out = _attend_natively(q, k, v, mask, scale=scale, segment_lengths=segment_lengths)
    elif segment_lengths is None:
        out = _attend(q, k, v, None if is_causal_row else attention_mask, scale, settings)
    else:
        queries, keys, values = (x.split(list(segment_lengths), dim=2) for x in (q, k, v))
        segments = zip(queries, keys, values, strict=True)
        out = torch.cat([_attend(*qkv, None, scale, settings) for qkv in segments], dim=2)
    return (round_bf16_(out) if emulates else out).transpose(1, 2).contiguous(), None


def no_mask(device: torch.device) -> Tensor:
    """Return an `attention_mask` for a model whose attention is told otherwise what is visible (`segment_lengths`,
    `is_causal_row`): transformers takes four dimensions for a finished mask. Without one it builds a mask of [T, T],
    and a GPU's host waits until it has looked at the positions."""
    return torch.zeros(1, 1, 1, 1, device=device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scale: float, settings: SiteSettings
) -> Tensor:
    """softmax(q k^T * scale) v over visible keys, [B, Hq, T, D]; the output is not rounded yet."""
    part = settings.sequence
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # of bf16 tensors in float32, as attention kernels keep them; probabilities go back to bf16
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.transpose(2, 3).to(wide)) * scale
    lowest = torch.finfo(scores.dtype).min
    if part is not None:
        scores = scores.masked_fill(part.hidden_keys(scores.device), lowest)
    elif attention_mask is None:
        length = scores.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, lowest)
    else:
        scores = scores + attention_mask
    # softmax saves its output for the backward, so this rounding may not happen in place.
    probs = torch.softmax(scores, dim=-1)
    if settings.arithmetic.emulates_bf16 and settings.arithmetic.rounds_probabilities:
        probs = round_bf16_through(probs)
    return torch.matmul(probs.to(v.dtype), v)


def _attend_natively(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    segment_lengths: Sequence[int] | None,
) -> Tensor:
    """torch's attention over visible keys, [B, Hq, T, D]; segments become rows, padded on their right."""
    if segment_lengths is None:
        return _torch_attention(q, k, v, mask, scale)
    groups, inverse = _rows_of_segments(tuple(segment_lengths), q.device)
    found = []
    for places, shape in groups:
        rows = [x[0].index_select(1, places).unflatten(1, shape).transpose(0, 1) for x in (q, k, v)]
        out = _torch_attention(rows[0], rows[1], rows[2], None, scale)
        found.append(out.transpose(0, 1).flatten(1, 2))
    return torch.cat(found, dim=1).index_select(1, inverse).unsqueeze(0)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask is None else mask.to(q.dtype),
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


@lru_cache(maxsize=8)
def _rows_of_segments(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[tuple[tuple[Tensor, tuple[int, int]], ...], Tensor]:
    """Rows [B, W] of columns, one per segment of [W/2 + 1, W] columns (a launch per segment takes longer than padding),
    and where every column is among the results of all rows. Made in host memory; all layers of a pass ask for them."""
    sizes = torch.tensor(lengths, device="cpu")
    starts = sizes.cumsum(0) - sizes
    inverse = torch.empty(int(sizes.sum()), dtype=torch.int64, device="cpu")
    widths = [(length - 1).bit_length() for length in lengths]
    groups, offset = [], 0
    for width in sorted(set(widths)):
        chosen = torch.tensor([i for i, found in enumerate(widths) if found == width], device="cpu")
        counts = sizes[chosen, None]
        steps = torch.arange(int(counts.max()), device="cpu")
        places = starts[chosen, None] + torch.minimum(steps, counts - 1)  # padding repeats the last column
        is_real = (steps < counts).flatten()
        inverse[places.flatten()[is_real]] = offset + is_real.nonzero()[:, 0]
        offset += is_real.numel()
        groups.append((upload(places.flatten(), device), (places.shape[0], places.shape[1])))
    return tuple(groups), upload(inverse, device)


def _check_segments(segment_lengths: Sequence[int], *, num_tokens: int, settings: SiteSettings) -> None:
    if (
        settings.sequence is not None
        or sum(segment_lengths) != num_tokens
        or min(segment_lengths, default=1) < 1
    ):
        raise ConfigError(
            f"attention: segments of lengths {tuple(segment_lengths)} are refused for {num_tokens} columns"
            f"{' of a sequence that is split over ranks' if settings.sequence is not None else ''}. Allowed are "
            "lengths of at least 1 that add up to the columns of a whole row. Pass the lengths of the packed samples."
        )


def register_attention() -> None:
    """Make `attn_implementation="tracefp4"` known to transformers, with the eager mask (idempotent)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION_NAME, opaque(attention_forward))
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
