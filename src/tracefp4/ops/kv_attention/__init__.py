"""Causal attention of new queries over cache pages: the only K and V it can see are what the pages hold.

For query i of a sequence at position p_i and keys j = 0..p_i (grouped queries: H / C query heads share a kv
head):

    s_ij = (q_i . k_j) * D^-1/2         m_i = max_j s_ij
    per split of 64 positions, in order:  e = exp(s - m);  l += sum(e);  o += R(e) v
    a_i = o / l

R rounds the unnormalised probabilities to bf16 when asked, which is what a flash-decoding kernel feeds its
second matmul; a trainer that rounds the normalised row computes the same function in another order. Prefill,
chunked prefill and decode are one code path: they differ only in Q, the number of queries per sequence.

Kernels for GPUs take other splits, the next power of two for e^m in what they round, and l of the rounded e; they are
held to a tolerance, and their results depend on nothing but the sequence (device.py).
"""

import torch
from torch import Tensor

from tracefp4.errors import BackendError, FormatError
from tracefp4.ops.backend import Backend, choose
from tracefp4.ops.kv_attention.device import SCOPE, attend_on_device, case_of, is_covered
from tracefp4.ops.kv_attention.reference import SPLIT, attend_reference
from tracefp4.ops.pages import LayerPages

__all__ = ["SPLIT", "kv_attention"]


def kv_attention(
    queries: Tensor,
    pages: LayerPages,
    *,
    page_table: Tensor,
    positions: Tensor,
    rounds_probabilities: bool,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Attend from queries to the pages of their own sequence.

    Args:
        queries: float [B, Q, H, D], after RoPE. bf16 queries are computed in float32.
        pages: K and V of the layer, layouts of `ops.kv_append`: FP4 with a static outer scale, or float [C, F, S, D].
        page_table: int64 [B, N], frames of each sequence in order; padding may name any frame.
        positions: int64 [B, Q], position of each query, in 0 .. N*S-1; keys after it are not seen. A padding
            query may have any valid position; its output row is meaningless.
        rounds_probabilities: apply R above.
        backend: Implementation. AUTO takes the reference for operands that the GPU's kernels do not take: other
            dtypes, head dims or page sizes, FP4 pages in plain order.

    Returns:
        [B, Q, H, D] in the dtype of the queries. B = 0 gives an empty result. A NaN or Inf in a page reaches
        only the sequences whose table names that page within a split that is read.

    Raises:
        FormatError: head counts, head dims or index dtypes do not fit.
        BackendError: the backend cannot run here, or not with these operands.
    """
    _check(queries, pages, page_table, positions)
    attend, case = attend_reference, None
    if is_covered(queries, pages):
        case = case_of(queries, pages, rounds_probabilities)
    chosen = choose("kv_attention", queries.device, backend, case)
    if chosen is Backend.CUDA and case is not None:
        attend = attend_on_device
    elif backend is Backend.CUDA:
        kinds = ", ".join(type(part).__name__ for part in (pages.keys, pages.values))
        raise BackendError(
            f"kv_attention cannot run CUDA on these operands; got {queries.dtype} queries of head dim "
            f"{queries.shape[3]} and pages {kinds}. Its kernels take {SCOPE}. Pass AUTO, which takes the reference."
        )
    return attend(
        queries,
        pages,
        page_table=page_table,
        positions=positions,
        rounds_probabilities=rounds_probabilities,
    )


def _check(queries: Tensor, pages: LayerPages, page_table: Tensor, positions: Tensor) -> None:
    keys = pages.keys
    num_kv, head_dim = (
        (keys.shape[0], keys.shape[3])
        if isinstance(keys, Tensor)
        else (keys.packed.shape[0], keys.packed.shape[3] * 2)
    )
    num_heads = queries.shape[2]
    if queries.shape[3] != head_dim or num_heads % num_kv:
        raise FormatError(
            f"Queries do not fit the pages; got {num_heads} query heads of dim {queries.shape[3]} for "
            f"{num_kv} kv heads of dim {head_dim}. Head dims must be equal and query heads a multiple of "
            "kv heads. Build the pool from the model's config."
        )
    if page_table.dtype != torch.int64 or positions.dtype != torch.int64:
        raise FormatError(
            f"Page tables and positions are int64; got {page_table.dtype} and {positions.dtype}. No other integers "
            "are taken. Convert them once per pass."
        )
