"""The trainer's attention over K and V exactly as an FP4 cache would hold them.

K (after RoPE) and V are rounded per token and head before any query reads them, so a full-sequence training
pass and a token-by-token rollout compute the same function. Order of operations ("full row"):
a = R(R(softmax(q k^T * scale)) v), R = bf16 rounding; a real engine splits the row and rounds the
unnormalised probabilities per split, and that difference in order is the mismatch that guidance absorbs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats import LayerPrecision
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.guidance import Site, round_site
from tracefp4.guidance.record import SiteKind
from tracefp4.qat.ste import round_bf16_through, straight_through

ATTENTION_NAME = "tracefp4"


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
    """Called with every unrounded K and V [B * T, Hkv * D] (calibration); None in training."""


def cached(x: Tensor, settings: SiteSettings, kind: SiteKind) -> Tensor:
    """Return K or V [B, Hkv, T, D] as the cache holds it, gradient straight-through."""
    precision = settings.precision
    if settings.arithmetic.emulates_bf16:
        x = round_bf16_(x)
    if precision.kv is None and settings.observer is None:
        return x
    num_batch, num_heads, num_tokens, head_dim = x.shape
    flat = x.detach().transpose(1, 2).reshape(num_batch * num_tokens, num_heads * head_dim)
    site = Site(kind=kind, layer=settings.layer)
    if settings.observer is not None:
        settings.observer(site, flat)
    if precision.kv is None:
        return x
    exponent = precision.k_exponent if kind == "k" else precision.v_exponent
    rounded = round_site(flat, site=site, scheme=precision.kv, exponent=exponent, with_codes=False)
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
    **unused: object,
) -> tuple[Tensor, None]:
    """Attend over rounded keys and values; the signature is transformers' attention interface.

    Args:
        module: the attention module, with `tracefp4` (SiteSettings) set.
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D], after QK-norm and RoPE.
        attention_mask: additive [B, 1, T, T] (transformers' eager mask), or None for plain causal.
        scaling: multiplies the scores; 1 / sqrt(D) when None.
        dropout: must be 0; a recorded rollout has no dropout to follow.
        unused: what transformers passes to every implementation (window, cache arguments).

    Returns:
        ([B, T, Hq, D], None).

    Raises:
        ConfigError: dropout is not 0.
    """
    if dropout:
        raise ConfigError(
            f"attention dropout {dropout} is refused: a rollout has none. Only 0 is allowed. Set the model "
            "config's attention_dropout to 0."
        )
    settings: SiteSettings = module.tracefp4  # type: ignore[assignment]
    emulates = settings.arithmetic.emulates_bf16
    q = round_bf16_(query) if emulates else query
    k, v = cached(key, settings, "k"), cached(value, settings, "v")
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is None:
        length = scores.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    # softmax saves its output for the backward, so this rounding may not happen in place.
    probs = torch.softmax(scores, dim=-1)
    if emulates and settings.arithmetic.rounds_probabilities:
        probs = round_bf16_through(probs)
    out = torch.matmul(probs, v)
    return (round_bf16_(out) if emulates else out).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `attn_implementation="tracefp4"` known to transformers, with the eager mask (idempotent)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
