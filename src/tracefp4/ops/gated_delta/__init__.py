"""gated_delta: the layers of a hybrid model that keep a matrix per head instead of keys and values.

Per token, with R rounding to bf16 where a bf16 tensor would be written and the rest in float32 (or float64):

    q, k, v = parts of R(silu(R(conv(mixed)))), the convolution causal over K tokens, a channel by itself
    k = k / |k|;   q = Dk^-1/2 q / |q|;   beta = R(sigmoid(b));   decay = exp(-exp(a_log) softplus(a + dt_bias))
    S = decay S;   S = S + beta (v - S k) k^T;   o = S q;   out = R(R(norm R(R(o) / rms(o))) silu(z))

S [Dv, Dk] belongs to a value head; Hv / Hk value heads share the q and k of a key head. A decode step rounds S to its
storage once, after o was taken from it; a prefill rounds S once, after the last token. Shapes: B sequences, T tokens, S
slots, K taps, W = 2 Hk Dk + Hv Dv channels.
"""

import torch
from torch import Tensor

from tracefp4.errors import BackendError, FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.gated_delta.device import HEAD_DIMS, SCOPE, case_of, is_covered, step_on_device
from tracefp4.ops.gated_delta.operands import DeltaState, DeltaWeights, Projected
from tracefp4.ops.gated_delta.prefill import prefill
from tracefp4.ops.gated_delta.reference import step_reference

__all__ = ["HEAD_DIMS", "DeltaState", "DeltaWeights", "Projected", "gated_delta_prefill", "gated_delta_step"]


@torch.no_grad()
def gated_delta_step(
    projected: Projected,
    weights: DeltaWeights,
    state: DeltaState,
    *,
    slots: Tensor,
    emulates_bf16: bool = False,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Advance B sequences by one token each; their states are replaced in place.

    Args:
        projected: [B, ..], one float dtype; may be views into the output of one projection. B = 0 is fine.
        weights: Of the layer.
        state: Of all sequences, contiguous.
        slots: int64 [B], where each sequence's state is; distinct. A negative slot reads and writes no state and gives
            a row of zeros.
        emulates_bf16: R rounds, in a dtype wider than bf16.
        backend: Implementation. AUTO takes the reference for operands that the GPU's kernels do not take.

    Returns:
        [B, Hv Dv] in the dtype of the projections. A backend's exponentials may differ from the reference's in their
        last bits, which shows where a rounding to bf16 is that near; given the same q, k, v, decay and beta the states
        are equal bit for bit. NaN and Inf stay in their sequence. No autograd.

    Raises:
        FormatError: Shapes or dtypes do not fit.
        BackendError: The backend cannot run here, or not with these operands.
    """
    _check(projected, weights, state, (*slots.shape,))
    _check_index("slots", slots, slots.shape[0])
    covers = not emulates_bf16 and is_covered(projected, weights, state)
    case = case_of(weights, state) if covers else None
    chosen = choose("gated_delta", slots.device, backend, case)
    if chosen is Backend.CUDA and covers:
        return step_on_device(projected, weights, state, slots)
    if backend is Backend.CUDA:
        raise BackendError(
            f"gated_delta cannot run CUDA on these operands; got {projected.mixed.dtype} projections (emulating bf16: "
            f"{emulates_bf16}) and {state.recurrent.dtype} states {tuple(state.recurrent.shape[1:])}. Its kernels take "
            f"{SCOPE}. Pass AUTO, which takes the reference."
        )
    return step_reference(projected, weights, state, slots, emulates_bf16=emulates_bf16)


@torch.no_grad()
def gated_delta_prefill(
    projected: Projected,
    weights: DeltaWeights,
    state: DeltaState,
    *,
    slots: Tensor,
    lengths: Tensor,
    emulates_bf16: bool = False,
) -> Tensor:
    """Advance B sequences by up to T tokens each; their states are replaced in place. Plain torch on every device.

    Args:
        projected: [B, T, ..], one float dtype; T = 0 is not allowed. Rows from `lengths` on are padding, finite.
        weights: Of the layer.
        state: Of all sequences.
        slots: int64 [B], distinct, none negative.
        lengths: int64 [B], tokens of each sequence, 0 .. T.
        emulates_bf16: R rounds, in a dtype wider than bf16.

    Returns:
        [B, T, Hv Dv]; padding rows are meaningless. Equal to as many steps up to the order of operations, except that
        a state that is stored in bf16 is rounded once and not at every token. No autograd.

    Raises:
        FormatError: Shapes or dtypes do not fit.
    """
    _check(projected, weights, state, (slots.shape[0], *projected.mixed.shape[1:2]))
    for name, index in (("slots", slots), ("lengths", lengths)):
        _check_index(name, index, projected.mixed.shape[0])
    return prefill(projected, weights, state, slots, lengths, emulates_bf16=emulates_bf16)


def _check(projected: Projected, weights: DeltaWeights, state: DeltaState, leading: tuple[int, ...]) -> None:
    dtypes = {part.dtype for part in (*projected, weights.taps, weights.norm, state.conv)}
    gates = {part.dtype for part in (weights.a_log, weights.dt_bias)}
    if len(dtypes) != 1 or gates != {torch.promote_types(torch.float32, projected.mixed.dtype)}:
        raise FormatError(
            "gated_delta needs projections, taps, norm and convolution state of one float dtype, and a_log and dt_bias "
            f"in float32 (float64 beside float64); got {dtypes} and {gates}. Cast the weights when they are loaded."
        )
    if state.recurrent.dim() != 4 or weights.taps.dim() != 2:
        raise FormatError(
            f"gated_delta needs recurrent states [S, Hv, Dv, Dk] and taps [K, W]; got {tuple(state.recurrent.shape)} "
            f"and {tuple(weights.taps.shape)}. Transpose a convolution's weight [W, 1, K]."
        )
    (num_slots, heads, value_dim, key_dim), (num_taps, width) = state.recurrent.shape, weights.taps.shape
    key_width = (width - heads * value_dim) // 2
    found = [tuple(part.shape) for part in projected]
    expected = [(*leading, n) for n in (width, heads * value_dim, heads, heads)]
    found += [tuple(t.shape) for t in (weights.a_log, weights.dt_bias, weights.norm, state.conv)]
    expected += [(heads,), (heads,), (value_dim,), (num_slots, num_taps - 1, width)]
    is_divided = key_width > 0 and key_width % key_dim == 0 and heads % (key_width // key_dim) == 0
    if found != expected or not is_divided or 2 * key_width + heads * value_dim != width:
        raise FormatError(
            f"gated_delta: shapes do not fit; got mixed, z, b, a, a_log, dt_bias, norm, conv {found} beside {heads} "
            f"states {value_dim} x {key_dim} and {num_taps} taps of {width} channels. Expected {expected}, and "
            "channels of q, k and v whose key heads divide the value heads. Make the states from the model's sizes."
        )


def _check_index(name: str, index: Tensor, num_seqs: int) -> None:
    if index.dtype != torch.int64 or index.shape != (num_seqs,):
        raise FormatError(
            f"gated_delta takes {name} as int64 [{num_seqs}]; got {index.dtype} {tuple(index.shape)}. One for every "
            "sequence. Make them on the host, once per pass."
        )
