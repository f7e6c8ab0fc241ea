"""expert_layer: the routed experts of one layer in W4A4, from normed hidden states to their weighted sum.

    x^ = Q(x);   g, u = R(W13[e] x^);   h = R(R(silu(g)) u);   h^ = Q(h);   y_j = R(W2[e] h^);   y = R(sum_j w_j y_j)

for the experts e = ids[t, j] of every token t. R rounds to bf16, Q to nearest under the activation scheme (or not at
all); products are exact in every term and accumulate in float32; the sum over j runs in the order of the slots, in
float32. (The engine in native bf16 also rounds w_j y_j before it is added.)

Shapes: T tokens, k experts of each, P = T k pairs, E experts, H hidden, I intermediate. Forward only, nearest rounding
only: guided rounding and gradients are what `guided_quantize` and `grouped_matmul` are for. Weights are in fragment
order (`formats/weight_fragments.py`); `refit` writes a new version of them in place.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.weight_fragments import WeightFragments
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.expert_layer.device import case_of, expert_layer_on_device, refit_on_device
from tracefp4.ops.expert_layer.operands import ExpertOutput, Experts, Routing
from tracefp4.ops.expert_layer.reference import expert_layer_reference, refit_reference

__all__ = ["ExpertOutput", "Experts", "Routing", "expert_layer", "refit"]

_LAYER = {Backend.CUDA: expert_layer_on_device, Backend.REFERENCE: expert_layer_reference}
_REFIT = {Backend.CUDA: refit_on_device, Backend.REFERENCE: refit_reference}


def expert_layer(
    x: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    precision: LayerPrecision,
    with_codes: bool = False,
    backend: Backend = Backend.AUTO,
) -> ExpertOutput:
    """Compute the routed experts of one layer.

    Args:
        x: bfloat16 [T, H]; T = 0 is fine.
        routing: Experts and weights of every token. Ids are not looked at before the kernels run: a token with an id
            outside 0 .. E - 1 gets NaN, and the w2 bytes of that pair mean nothing.
        experts: Weights.
        precision: `activation` rounds x and h, per row, statically (`x_exponent`, `w2_exponent`) or under MXFP4; None
            leaves them bf16. `weight` must be the scheme of the experts. `kv` is not read.
        with_codes: Also return the bytes of x and h, for a record.
        backend: Implementation.

    Returns:
        y, and the bytes. NaN and Inf in x make their block NaN, and with it the token's output; a weight block with the
        NaN byte makes its output column NaN for the expert's tokens. On CUDA a token's bits do not depend on the other
        tokens, and runs repeat bit for bit; they depend on whether T k / min(E, T k) is above 1, and on sm_90 above 46:
        sums run in another order there.

    Raises:
        FormatError: When shapes, dtypes or schemes do not fit.
        BackendError: When the backend cannot run here.
    """
    _check_operands(x, routing, experts)
    _check_schemes(experts, precision)
    case = case_of(routing.ids.numel(), experts, precision.activation)
    chosen = choose("expert_layer", x.device, backend, case)
    return _LAYER[chosen](x, routing, experts, precision, with_codes)


def refit(weights: Tensor, fragments: WeightFragments, *, backend: Backend = Backend.AUTO) -> None:
    """Quantize a new version of the weights into existing fragments, in place.

    The bytes are those of `to_fragments(quantize(weights, scheme=fragments.scheme))`, the addresses stay: a captured
    CUDA graph reads the new version. Exponents of a static scheme are kept.

    Args:
        weights: bfloat16 [E, N, K], on the device of the fragments; any strides.
        fragments: Of the same shape; overwritten.
        backend: Implementation.

    Raises:
        FormatError: When shape, dtype or device do not fit.
        BackendError: When the backend cannot run here.
    """
    fits = weights.shape == fragments.shape and weights.device == fragments.words.device
    if weights.dtype != torch.bfloat16 or not fits:
        raise FormatError(
            f"refit needs bfloat16 weights {tuple(fragments.shape)} on {fragments.words.device}; got {weights.dtype} "
            f"{tuple(weights.shape)} on {weights.device}. Make fragments of the new shape with empty_fragments."
        )
    chosen = choose("expert_layer", weights.device, backend, fragments.scheme)
    _REFIT[chosen](weights.detach(), fragments)


def _check_operands(x: Tensor, routing: Routing, experts: Experts) -> None:
    num_experts, twice_inner, hidden = experts.gate_up.shape
    down_fits = tuple(experts.down.shape) == (num_experts, hidden, twice_inner // 2) and twice_inner % 32 == 0
    fits = x.dim() == 2 and x.shape[1] == hidden and down_fits
    ids, weights = routing
    routing_fits = ids.dim() == 2 and ids.shape == weights.shape and ids.shape[:1] == x.shape[:1]
    dtypes_fit = (
        x.dtype == torch.bfloat16
        and ids.dtype == torch.int64
        and weights.dtype in (torch.bfloat16, torch.float32)
    )
    _check_devices(x, routing, experts)
    if not (fits and routing_fits and dtypes_fit and ids.shape[1] > 0):
        raise FormatError(
            "expert_layer needs bfloat16 x [T, H], int64 ids and bfloat16 or float32 weights [T, k], gate_up "
            "[E, 2 I, H] and down [E, H, I] with I a multiple of 16; got "
            f"{x.dtype} {tuple(x.shape)}, {ids.dtype} {tuple(ids.shape)}, {weights.dtype} {tuple(weights.shape)}, "
            f"{tuple(experts.gate_up.shape)} and {tuple(experts.down.shape)}. Check the expert axis."
        )


def _check_devices(x: Tensor, routing: Routing, experts: Experts) -> None:
    devices = {"x": x.device, "ids": routing.ids.device, "weights": routing.weights.device}
    devices |= {name: getattr(experts, name).words.device for name in experts._fields}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise FormatError(
            f"expert_layer needs all operands on one device; got {found}. Move them to the device of x."
        )


def _check_schemes(experts: Experts, precision: LayerPrecision) -> None:
    schemes = {experts.gate_up.scheme, experts.down.scheme}
    if schemes != {precision.weight}:
        names = " and ".join(sorted(scheme.name for scheme in schemes))
        planned = precision.weight.name if precision.weight else "bf16"
        raise FormatError(
            f"expert_layer has experts under {names} where the precision says {planned}. Both must be one scheme. "
            "Quantize the weights under the plan's scheme."
        )
    if precision.activation is not None:
        _check_activation(precision.activation, experts)


def _check_activation(scheme: Scheme, experts: Experts) -> None:
    if not scheme.is_exact_in_bf16 or scheme.outer == "tensor":
        raise FormatError(
            f"expert_layer feeds bf16 matrix units with values that no other token decides about; got activation "
            f"{scheme.name}. Allowed are NVFP4 with order POW2 and an outer scale per row or static, MXFP4, and None. "
            "Use NVFP4_ROW_POW2."
        )
    widths = (experts.gate_up.width, experts.down.width)
    if any(width % scheme.block_size for width in widths):
        raise FormatError(
            f"expert_layer quantizes rows of H and I in blocks of {scheme.block_size} under {scheme.name}; got H, I = "
            f"{widths}. Both must be multiples. Use a scheme with blocks of 16."
        )
