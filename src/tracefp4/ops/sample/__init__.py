"""sample: the head of a language model and one draw per row, from normed hidden states to tokens and log-probs.

    l = R(hidden head^T);   p = cut(softmax(l / temperature));   token = first id with cumulative p above u;   log p

R rounds to bf16, so the distribution that a token is drawn from, and whose log-probability is returned, is the one of
bf16 logits. u is a hash of (key, position) (`noise.py`): a draw depends on nothing else in the batch. `draw` does the
same from logits that exist already, in plain torch.

Shapes: N rows, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.sample.device import kind_of, sample_on_device
from tracefp4.ops.sample.operands import Draws, Sampled
from tracefp4.ops.sample.reference import draw, sample_reference

__all__ = ["Draws", "Sampled", "draw", "sample"]

_SAMPLE = {Backend.CUDA: sample_on_device, Backend.REFERENCE: sample_reference}
_DTYPES = {
    "keys": torch.int64,
    "positions": torch.int64,
    "temperature": torch.float64,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "forced": torch.int64,
}


def sample(hidden: Tensor, head: Tensor, draws: Draws, *, backend: Backend = Backend.AUTO) -> Sampled:
    """Draw one token per row, or score given ones (`draws.forced`).

    Args:
        hidden: bfloat16 [N, H], after the last norm; H a multiple of 8. N = 0 gives empty results.
        head: bfloat16 [V, H], V at least 1.
        draws: Parameters of the N rows. Their values are not looked at before the kernels run.
        backend: Implementation.

    Returns:
        Token ids, and the natural log of the probability with which each was drawn; for greedy rows (the lowest id of
        the largest logit) that at temperature 1 and without top-p. A forced token that the cuts exclude has -Inf. A row
        with a logit that is NaN or +Inf, or with none above -Inf, has token -1 (or the forced one) and NaN, and so has
        a forced token outside the vocabulary. On CUDA sums of exponentials are float32 and cumulative masses integers:
        log-probabilities differ from the reference's by up to 1e-5, and tokens where u lies that near to the edge of
        one. They repeat bit for bit there. In batches of up to 16 rows a row's results do not depend on the other rows;
        in larger ones torch multiplies, and as with every product of its libraries the last bits of a logit, and with
        them a token, may depend on how many rows there are.

    Raises:
        FormatError: When shapes, dtypes or devices do not fit.
        BackendError: When the backend cannot run here.
    """
    _check(hidden, head, draws)
    chosen = choose("sample", hidden.device, backend, kind_of(len(hidden)))
    return _SAMPLE[chosen](hidden, head, draws)


def _check(hidden: Tensor, head: Tensor, draws: Draws) -> None:
    fits = hidden.dim() == head.dim() == 2 and hidden.shape[1] == head.shape[1] and head.shape[0] > 0
    if not fits or {hidden.dtype, head.dtype} != {torch.bfloat16} or hidden.shape[1] % 8:
        raise FormatError(
            "sample needs bfloat16 hidden states [N, H] and head [V, H], H a multiple of 8 and V at least 1; "
            f"got {hidden.dtype} {tuple(hidden.shape)} and {head.dtype} {tuple(head.shape)}. Check the transposition."
        )
    columns = {name: getattr(draws, name) for name in _DTYPES}
    for name, column in columns.items():
        if name == "forced" and column is None:
            continue
        if (
            column.shape != hidden.shape[:1]
            or column.dtype != _DTYPES[name]
            or column.device != hidden.device
        ):
            raise FormatError(
                f"sample needs {name} as {_DTYPES[name]} [{hidden.shape[0]}] on {hidden.device}; got {column.dtype} "
                f"{tuple(column.shape)} on {column.device}. One entry per row of the hidden states."
            )
