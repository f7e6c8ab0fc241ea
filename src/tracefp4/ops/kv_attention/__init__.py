"""Causal attention of new queries over cache pages: the only K and V it can see are what the pages hold.

For query i of a sequence at position p_i and keys j = 0..p_i (grouped queries: H / C query heads share a kv
head):

    s_ij = (q_i . k_j) * D^-1/2         m_i = max_j s_ij
    per split of 64 positions, in order:  e = exp(s - m);  l += sum(e);  o += R(e) v
    a_i = o / l

R rounds the unnormalised probabilities to bf16 when asked, which is what a flash-decoding kernel feeds its
second matmul; a trainer that rounds the normalised row computes the same function in another order. Prefill,
chunked prefill and decode are one code path: they differ only in Q, the number of queries per sequence.
"""

from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.ops.kv_attention import reference

SPLIT = reference.SPLIT


def kv_attention(
    queries: Tensor,
    *,
    keys: BlockTensor | Tensor,
    values: BlockTensor | Tensor,
    page_table: Tensor,
    positions: Tensor,
    rounds_probabilities: bool,
) -> Tensor:
    """Attend from queries to the pages of their own sequence.

    Args:
        queries: float [B, Q, H, D], after RoPE. bf16 queries are computed in float32.
        keys: pages of K, layout of `ops.kv_append`: FP4 (BlockTensor, static outer scale) or float [C, F, S,
            D].
        values: pages of V, the same layout.
        page_table: int64 [B, N], frames of each sequence in order; padding may name any frame.
        positions: int64 [B, Q], position of each query, in 0 .. N*S-1; keys after it are not seen. A padding
            query may have any valid position; its output row is meaningless.
        rounds_probabilities: apply R above.

    Returns:
        [B, Q, H, D] in the dtype of the queries. B = 0 gives an empty result. A NaN or Inf in a page reaches
        only the sequences whose table names that page within a split that is read.

    Raises:
        FormatError: head counts or head dims do not fit.
    """
    shape = keys.packed.shape if isinstance(keys, BlockTensor) else keys.shape
    head_dim = shape[3] * 2 if isinstance(keys, BlockTensor) else shape[3]
    num_heads = queries.shape[2]
    if queries.shape[3] != head_dim or num_heads % shape[0]:
        raise FormatError(
            f"Queries do not fit the pages; got {num_heads} query heads of dim {queries.shape[3]} for "
            f"{shape[0]} kv heads of dim {head_dim}. Head dims must be equal and query heads a multiple of "
            "kv heads. Build the pool from the model's config."
        )
    return reference.kv_attention(
        queries,
        keys=keys,
        values=values,
        page_table=page_table,
        positions=positions,
        rounds_probabilities=rounds_probabilities,
    )
