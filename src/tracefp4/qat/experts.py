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

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats import LayerPrecision, Scheme
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.guidance import Site, round_site
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.grouped_matmul import grouped_matmul
from tracefp4.ops.quantize import quantize
from tracefp4.qat.ste import clip_mask, straight_through

EXPERTS_NAME = "tracefp4"
BACKWARDS = ("dequantized", "high_precision")
STES = ("identity", "clip")
SITE_KINDS = {"gate_up_proj": "x", "down_proj": "w2"}


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
    """`identity`, or `clip` to block the gradient of saturated activations."""
    num_quantizations: int = 0
    """How often weights were quantized; a test holds it at once per version and matrix."""
    _copies: dict[str, tuple[tuple[int, int], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, allowed in (("backward", self.backward, BACKWARDS), ("ste", self.ste, STES)):
            if value not in allowed:
                raise ConfigError(f"experts: unknown {name} {value!r}; allowed: {', '.join(allowed)}.")

    def quantized(self, name: str, weight: nn.Parameter) -> Tensor:
        """Return the weight with FP4 values and its own gradient; quantize only when the version changed."""
        if self.precision.weight is None:
            return weight
        key = (weight.data_ptr(), weight._version)
        held = self._copies.get(name)
        if held is None or held[0] != key:
            values = dequantize(quantize(weight.detach(), scheme=self.precision.weight), dtype=weight.dtype)
            held = (key, values)
            self._copies[name] = held
            self.num_quantizations += 1
        return straight_through(weight, held[1])

    def rounded(self, x: Tensor, kind: str) -> Tensor:
        """Return the activations [N, K] as the experts see them, with a straight-through gradient."""
        scheme: Scheme | None = self.precision.activation
        if scheme is None:
            return x
        result = round_site(x.detach(), site=Site(kind=kind, layer=self.layer), scheme=scheme)
        keep = None
        if self.ste == "clip":
            keep = clip_mask(x, result.scales(x.dtype), block_size=scheme.block_format.block_size)
        return straight_through(x, result.values, keep=keep)

    def project(self, x: Tensor, order: Tensor, module: nn.Module, name: str, group_sizes: Tensor) -> Tensor:
        """Round x, gather its rows in expert order, and multiply them with the FP4 matrix `name`.

        Args:
            x: rows as the site records them: tokens [N, H] for w13, (token, slot) pairs [N * k, I] for w2.
            order: for each GEMM row, the row of x it reads.
            module: the experts module that owns the parameter.
            name: `gate_up_proj` or `down_proj`.
            group_sizes: GEMM rows of each expert.
        """
        weight: nn.Parameter = getattr(module, name)
        x_hat = self.rounded(x, SITE_KINDS[name])
        y_hat = grouped_matmul(x_hat.index_select(0, order), self.quantized(name, weight), group_sizes)
        if self.backward == "high_precision" and self.precision.weight is not None:
            y = grouped_matmul(x.index_select(0, order), weight, group_sizes)
            y_hat = y + (y_hat - y).detach()
        return self.round(y_hat)

    def round(self, x: Tensor) -> Tensor:
        """Round in place what a bf16 kernel would have written, if this arithmetic emulates bf16."""
        return round_bf16_(x) if self.arithmetic.emulates_bf16 else x


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the routed experts of one layer.

    Args:
        self: a fused experts module (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]) with `tracefp4` set.
        hidden_states: [N, H], rows of any batch layout.
        top_k_index: int64 [N, k], the experts of each token.
        top_k_weights: [N, k], their combination weights.

    Returns:
        [N, H]. Experts without tokens are fine; their gradient is a zero tensor of full shape.
    """
    state: ExpertWeights = self.tracefp4  # type: ignore[assignment]
    num_tokens, top_k = top_k_index.shape
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    group_sizes = torch.bincount(ids, minlength=int(self.gate_up_proj.shape[0]))  # type: ignore[union-attr]
    gate, up = state.project(hidden_states, order // top_k, self, "gate_up_proj", group_sizes).chunk(
        2, dim=-1
    )
    middle = state.round(state.round(nn.functional.silu(gate)) * up)
    # The record's rows are token-major (token, slot); the GEMM's rows are sorted by expert.
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    y = state.project(middle.index_select(0, inverse), order, self, "down_proj", group_sizes).index_select(
        0, inverse
    )
    y = y.view(num_tokens, top_k, -1) * top_k_weights.reshape(num_tokens, top_k, 1)
    return state.round(y.sum(dim=1))


def register_experts() -> None:
    """Make `experts_implementation="tracefp4"` known to transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
