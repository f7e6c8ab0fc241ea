"""Routed experts in FP4, through transformers' experts interface: one class, three modes.

Forward of token t with slots j = 1..k:  y_t = sum_j w_tj * W2^[e_tj] m^_tj,  m = silu(g) * u,
(g, u) = W13^[e_tj] x^_t, where ^ is dequantized FP4. x^ is rounded once per token and shared by all of its
experts; how it is rounded (nearest, recorded, following a record) is the session's business, see
`guidance.rounding.round_site`. Backward ("dequantized"): dx = dy W^, dW = dy^T x^, straight-through across
the quantizer. The alternative, gradients through the original operands ("high_precision"), exists because
papers compare it; it is reported to make gradient norms spike.

The quantized copy of the weights is made once per weight version and shared by every micro-batch and
recomputation. Writes through `.data`, which torch's version counter does not see (merging an adapter is one), are
noticed by a fingerprint of the bits: one more read of the weights per forward. For a float32 [128, 1536, 2048] that
takes 0.26 s on one CPU core, where making the FP4 copy takes 2.5 s; for a tiny model's [8, 64, 64] it takes 50
microseconds. Inside `steady_weights`, as in every call of the trainer, nobody writes, so the bits are not read, and
copies live no longer than the call. bf16 rounding is emulated at the outputs that a bf16 kernel would write.

Only whole matrices are quantized. FSDP gathers them before the forward, in memory whose version counter stands still
(the fingerprint notices), and experts on other ranks are reached through `dispatch`. A part of a matrix is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tracefp4.errors import ConfigError
from tracefp4.formats import LayerPrecision, Scheme
from tracefp4.formats.arithmetic import Arithmetic, round_bf16_
from tracefp4.formats.scaling import decode_scales
from tracefp4.guidance import Site, round_site
from tracefp4.guidance.record import SiteKind
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.grouped_matmul import grouped_matmul
from tracefp4.ops.quantize import quantize
from tracefp4.qat.dispatch import Dispatch, ExpertShard, dispatch
from tracefp4.qat.fingerprint import fingerprint
from tracefp4.qat.opaque import opaque
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
    """torch's version counter of the weight, which every in-place update raises but those through `.data`."""
    fingerprint: int | None
    """Of the weight's bits; notices the updates that the version does not count. None: not taken, as the copy does not
    outlive a time in which there are none."""
    values: Tensor
    """Dequantized values, the weight's shape and dtype."""

    def is_of(self, weight: Tensor) -> bool:
        """Return whether the weight still is what was quantized; reads its bits only when nothing else tells."""
        is_same = self.version == weight._version and self.source.data_ptr() == weight.data_ptr()
        return is_same and (self.fingerprint is None or self.fingerprint == fingerprint(weight))


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
    observer: Callable[[Site, Tensor], None] | None = None
    """Called with the activations of every site [N, K], which then stay unrounded where their scheme is static
    (calibration); None in training."""
    num_quantizations: int = 0
    """How often weights were quantized; a test holds it at once per version and matrix."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of every weight over all experts; a weight of another shape is refused. Empty: not checked."""
    shard: ExpertShard | None = None
    """Which experts are on this rank; None: all of them."""
    keeps_copies: bool = True
    """False quantizes in every forward and keeps nothing: for weights that FSDP frees after a layer, whose copies would
    hold as much memory as the unsharded experts."""
    is_steady: bool = False
    """True inside `steady_weights`."""
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

    def held(self, module: nn.Module, name: str) -> Tensor:
        """Return this rank's whole matrices [E here, M, K] of a weight.

        Raises:
            ConfigError: the parameter is a part of a matrix, or of the experts without a shard that says which.
        """
        weight: Tensor = getattr(module, name)
        is_sharded = isinstance(weight, DTensor)
        if is_sharded and self.shard is not None:
            weight = weight.to_local()  # type: ignore[attr-defined]
        wanted = self.shapes.get(name)
        if wanted is not None and self.shard is not None:
            wanted = (self.shard.num_held, *wanted[1:])
        if isinstance(weight, DTensor) or (wanted is not None and tuple(weight.shape) != wanted):
            raise ConfigError(
                f"experts of layer {self.layer}: {name} is not whole; got {_layout(getattr(module, name))}, and "
                f"{wanted or 'all experts'} is needed here: a part has another maximum, and its blocks another outer "
                "scale. Split experts with qat.shard_experts, parameters with FSDP (call the wrapped module, so "
                "that it gathers them), and do not use tensor parallelism on experts."
            )
        return weight

    def quantized(self, name: str, weight: Tensor) -> Tensor:
        """Return the FP4 values of a weight, no gradient; quantize only when the weight has changed."""
        scheme = self.precision.weight
        if scheme is None:
            return weight.detach()
        held = self._copies.get(name)
        if held is not None and self.keeps_copies and held.is_of(weight):
            return held.values
        source = weight.detach()
        values = dequantize(quantize(source, scheme=scheme), dtype=weight.dtype)
        self._copies.pop(name, None)
        if self.keeps_copies:
            self._copies[name] = WeightCopy(
                source=source,
                version=weight._version,
                fingerprint=None if self.is_steady else fingerprint(source),
                values=values,
            )
        self.num_quantizations += 1
        return values

    def copy_weights(self, module: nn.Module) -> None:
        """Quantize now what the next forward reads; weights that FSDP gathers there are not whole yet."""
        if self.precision.weight is None or not self.keeps_copies:
            return
        for name in SITE_KINDS:
            if not isinstance(getattr(module, name), DTensor):
                self.quantized(name, self.held(module, name))

    def forget(self) -> None:
        """Drop the quantized copies."""
        self._copies.clear()

    def rounded(self, x: Tensor, kind: SiteKind) -> tuple[Tensor, Tensor | None]:
        """Return the activations [N, K] as the experts see them, no gradient, and the mask of the clipped STE.

        The mask is bool [N, K], False outside the range of the block scale in use (the recorded one under
        replay), and None when every value keeps its gradient.
        """
        scheme: Scheme | None = self.precision.activation
        if scheme is None:
            return x.detach(), None
        site, exponent = Site(kind=kind, layer=self.layer), self.precision.exponent_of(kind)
        if self.observer is not None:
            self.observer(site, x.detach())
            if exponent is not None:
                return x.detach(), None
        result = round_site(x.detach(), site=site, scheme=scheme, exponent=exponent, with_codes=False)
        if self.ste == "identity":
            return result.values, None
        decode_scale = decode_scales(result.block_scales, result.outer, scheme, x.dtype)
        return result.values, clip_mask(x, decode_scale, block_size=scheme.block_size)

    def project(self, x: Tensor, way: Dispatch, module: nn.Module, name: str) -> Tensor:
        """Round x, send its rows to their experts, and multiply them with the FP4 matrix `name`.

        Args:
            x: rows as the site records them: tokens [N, H] for w13, (token, slot) pairs [N * k, I] for w2.
            way: to the experts.
            module: the experts module that owns the parameter.
            name: `gate_up_proj` or `down_proj`.
        """
        weight, sizes = self.held(module, name), way.group_sizes
        values, keep = self.rounded(x, SITE_KINDS[name])
        weight_hat = self.quantized(name, weight)
        if self.keeps_operands:
            with torch.no_grad():
                y_hat = grouped_matmul(way.send(values), weight_hat, sizes)
            x_exact = x if keep is None else straight_through(x, x, keep=keep)
            y = grouped_matmul(way.send(x_exact), weight, sizes)
            return self.round(straight_through(y, y_hat))
        x_hat = straight_through(x, values, keep=keep)
        weight_hat = straight_through(weight, weight_hat)
        return self.round(grouped_matmul(way.send(x_hat), weight_hat, sizes))

    def round(self, x: Tensor) -> Tensor:
        """Round in place what a bf16 kernel would have written, if this arithmetic emulates bf16."""
        return round_bf16_(x) if self.arithmetic.emulates_bf16 else x


@contextmanager
def steady_weights(model: nn.Module) -> Iterator[None]:
    """Promise that weights are written in counted ways only inside (by optimizers, `copy_`; not through `.data`).

    Versions then tell which copies hold; without it every forward reads all weights to be sure, and a GPU's host waits
    for it. Copies made before are not used; they are made at once, so that a GPU has work while its host prepares the
    first pass, and dropped at the end.

    Args:
        model: patched by `patching.apply`; without patched experts nothing happens.
    """
    found = {module: getattr(module, "tracefp4", None) for module in model.modules()}
    states = {module: state for module, state in found.items() if isinstance(state, ExpertWeights)}
    try:
        for state in states.values():
            state.forget()
            state.is_steady = True
        for module, state in states.items():
            state.copy_weights(module)
        yield
    finally:
        for state in states.values():
            state.forget()
            state.is_steady = False


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
    way = dispatch(top_k_index, num_experts=self.gate_up_proj.shape[0], shard=state.shard)
    gate, up = state.project(hidden_states, way, self, "gate_up_proj").chunk(2, dim=-1)
    middle = state.round(state.round(nn.functional.silu(gate)) * up)
    y = way.back(state.project(way.back(middle), way, self, "down_proj"))
    y = y.unflatten(0, top_k_index.shape) * top_k_weights.unsqueeze(-1)
    return state.round(y.sum(dim=1))


def _layout(weight: Tensor) -> str:
    where = f", a DTensor with placements {weight.placements}" if isinstance(weight, DTensor) else ""
    return f"{tuple(weight.shape)}{where}"


def register_experts() -> None:
    """Make `experts_implementation="tracefp4"` known to transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, opaque(experts_forward))
