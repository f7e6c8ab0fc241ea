"""Routed experts in FP4, through transformers' experts interface: one class, three modes.

Forward of token t with slots j = 1..k:  y_t = sum_j w_tj * W2^[e_tj] m^_tj,  m = silu(g) * u,
(g, u) = W13^[e_tj] x^_t, where ^ is dequantized FP4. x^ is rounded once per token and shared by all of its
experts; how it is rounded (nearest, recorded, following a record) is the session's business, see
`guidance.rounding.round_site`. Backward ("dequantized"): dx = dy W^, dW = dy^T x^, straight-through across
the quantizer. The alternative, gradients through the original operands ("high_precision"), exists because
papers compare it; it is reported to make gradient norms spike.

The quantized copy of the weights is made once per weight version and shared by every micro-batch and
recomputation. bf16 rounding is emulated at the outputs that a bf16 kernel would write.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats import LayerPrecision, Scheme
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.formats.scaling import decode_scales
from tracefp4.guidance import Site, round_site
from tracefp4.guidance.record import SiteKind
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.grouped_matmul import grouped_matmul
from tracefp4.ops.quantize import quantize
from tracefp4.qat.ste import clip_mask, straight_through

EXPERTS_NAME = "tracefp4"
BACKWARDS = ("dequantized", "high_precision")
STES = ("identity", "clip")
SITE_KINDS: dict[str, SiteKind] = {"gate_up_proj": "x", "down_proj": "w2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCopy:
    """FP4 values of one weight at one version."""

    source: Tensor
    """The weight's data; held so that its address cannot be given to another tensor."""
    version: int
    """torch's version counter of the weight, which every in-place update raises (a write through `.data` does
    not: optimizers must use `copy_` under no_grad)."""
    values: Tensor
    """Dequantized values, the weight's shape and dtype."""


@dataclass
class ExpertWeights:
    """What one experts module needs beside its parameters: its layer, precision, and the quantized copies."""

    layer: int
    """Index of the decoder layer; part of the site's name."""
    precision: LayerPrecision
    """Schemes of this layer; `activation` and `weight` None mean bf16."""
    arithmetic: Arithmetic
    """How the numbers around the quantizers are computed."""
    backward: str = "dequantized"
    """`dequantized` or `high_precision`."""
    ste: str = "identity"
    """`identity`, or `clip` to block the gradient of activations outside the range of their block."""
    num_quantizations: int = 0
    """How often weights were quantized; a test holds it at once per version and matrix."""
    _copies: dict[str, WeightCopy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, allowed in (("backward", self.backward, BACKWARDS), ("ste", self.ste, STES)):
            if value not in allowed:
                raise ConfigError(f"experts: unknown {name} {value!r}; allowed: {', '.join(allowed)}.")

    @property
    def keeps_operands(self) -> bool:
        """True if gradients are taken at the operands before rounding."""
        is_rounded = self.precision.activation is not None or self.precision.weight is not None
        return is_rounded and self.backward == "high_precision"

    def quantized(self, name: str, weight: Tensor) -> Tensor:
        """Return the FP4 values of a weight, no gradient; quantize only when the version has changed."""
        scheme = self.precision.weight
        if scheme is None:
            return weight.detach()
        held, version = self._copies.get(name), weight._version
        if held is None or held.version != version or held.source.data_ptr() != weight.data_ptr():
            source = weight.detach()
            values = dequantize(quantize(source, scheme=scheme), dtype=weight.dtype)
            held = WeightCopy(source=source, version=version, values=values)
            self._copies[name] = held
            self.num_quantizations += 1
        return held.values

    def rounded(self, x: Tensor, kind: SiteKind) -> tuple[Tensor, Tensor | None]:
        """Return the activations [N, K] as the experts see them, no gradient, and the mask of the clipped STE.

        The mask is bool [N, K], False outside the range of the block scale in use (the recorded one under
        replay), and None when every value keeps its gradient.
        """
        scheme: Scheme | None = self.precision.activation
        if scheme is None:
            return x.detach(), None
        result = round_site(
            x.detach(), site=Site(kind=kind, layer=self.layer), scheme=scheme, with_codes=False
        )
        if self.ste == "identity":
            return result.values, None
        decode_scale = decode_scales(result.block_scales, result.exponent, x.dtype)
        return result.values, clip_mask(x, decode_scale, block_size=scheme.block_size)

    def project(self, x: Tensor, order: Tensor, module: nn.Module, name: str, group_sizes: Tensor) -> Tensor:
        """Round x, gather its rows in expert order, and multiply them with the FP4 matrix `name`.

        Args:
            x: rows as the site records them: tokens [N, H] for w13, (token, slot) pairs [N * k, I] for w2.
            order: for each GEMM row, the row of x it reads.
            module: the experts module that owns the parameter.
            name: `gate_up_proj` or `down_proj`.
            group_sizes: GEMM rows of each expert.
        """
        weight: Tensor = getattr(module, name)
        values, keep = self.rounded(x, SITE_KINDS[name])
        weight_hat = self.quantized(name, weight)
        if self.keeps_operands:
            with torch.no_grad():
                y_hat = grouped_matmul(values.index_select(0, order), weight_hat, group_sizes)
            x_exact = x if keep is None else straight_through(x, x, keep=keep)
            y = grouped_matmul(x_exact.index_select(0, order), weight, group_sizes)
            return self.round(straight_through(y, y_hat))
        x_hat = straight_through(x, values, keep=keep)
        weight_hat = straight_through(weight, weight_hat)
        return self.round(grouped_matmul(x_hat.index_select(0, order), weight_hat, group_sizes))

    def round(self, x: Tensor) -> Tensor:
        """Round in place what a bf16 kernel would have written, if this arithmetic emulates bf16."""
        return round_bf16_(x) if self.arithmetic.emulates_bf16 else x


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the routed experts of one layer.

    Args:
        self: a fused experts module (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]) with `tracefp4` set.
        hidden_states: [N, H], rows of any batch layout.
        top_k_index: int64 [N, k], the experts of each token.
        top_k_weights: [N, k], their combination weights.

    Returns:
        [N, H]. Experts without tokens are fine; their gradient is a zero tensor of full shape.
    """
    state: ExpertWeights = self.tracefp4
    num_tokens, top_k = top_k_index.shape
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    group_sizes = torch.bincount(ids, minlength=self.gate_up_proj.shape[0])
    both = state.project(hidden_states, order // top_k, self, "gate_up_proj", group_sizes)
    gate, up = both.chunk(2, dim=-1)
    middle = state.round(state.round(nn.functional.silu(gate)) * up)
    # The record's rows are token-major (token, slot); the GEMM's rows are sorted by expert.
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    y = state.project(middle.index_select(0, inverse), order, self, "down_proj", group_sizes)
    y = y.index_select(0, inverse).unflatten(0, (num_tokens, top_k)) * top_k_weights.unsqueeze(-1)
    return state.round(y.sum(dim=1))


def register_experts() -> None:
    """Make `experts_implementation="tracefp4"` known to transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
