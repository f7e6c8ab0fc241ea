"""The definition of kv_attention in plain torch: gather pages, decode them, attend split by split.

Letters: B sequences, Q queries each, H query heads, C kv heads, D head dim, N pages of a table, S slots per
page, L = N*S key positions. Everything is head-first ([C, B, ...]), so both matmuls are one batched product
without copies.

Codes are decoded a byte at a time: a table of 256 entries holds both E2M1 values of every byte as one 8-byte
entry, so it stays in the fastest cache and no integer array larger than the byte index is ever made.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from tracefp4.formats.arithmetic import round_bf16_
from tracefp4.formats.fragments import BLOCK_SIZE, FragmentPages, from_fragments
from tracefp4.formats.grid import decode_e2m1, decode_e4m3
from tracefp4.ops.pages import LayerPages, Pages

SPLIT = 64


def attend_reference(
    queries: Tensor,
    pages: LayerPages,
    *,
    page_table: Tensor,
    positions: Tensor,
    rounds_probabilities: bool,
) -> Tensor:
    """Attend with checked operands; see `kv_attention`."""
    num_seqs, num_queries, num_heads, head_dim = queries.shape
    dtype = torch.float32 if queries.dtype == torch.bfloat16 else queries.dtype
    k_CBLD, v_CBLD = (read_pages(part, page_table, dtype) for part in (pages.keys, pages.values))
    num_kv, _, length, _ = k_CBLD.shape
    group = num_heads // num_kv
    q = queries.to(dtype).view(num_seqs, num_queries, num_kv, group, head_dim).permute(2, 0, 3, 1, 4)
    q = q.reshape(num_kv * num_seqs, group * num_queries, head_dim)
    scores = torch.bmm(q, k_CBLD.view(-1, length, head_dim).transpose(1, 2)).mul_(head_dim**-0.5)
    hidden_BQL = torch.arange(length, device=queries.device) > positions[..., None]
    scores.view(num_kv, num_seqs, group, num_queries, length).masked_fill_(
        hidden_BQL[None, :, None], -torch.inf
    )
    out = _attend(scores, v_CBLD.view(-1, length, head_dim), rounds_probabilities=rounds_probabilities)
    out = out.view(num_kv, num_seqs, group, num_queries, head_dim).permute(1, 3, 0, 2, 4)
    return out.reshape(num_seqs, num_queries, num_heads, head_dim).to(queries.dtype)


def _attend(scores: Tensor, values: Tensor, *, rounds_probabilities: bool) -> Tensor:
    """Softmax-weighted sum in split order; scores [X, Y, L] (overwritten), values [X, L, D] -> [X, Y, D]."""
    exps = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    total, out = None, None
    for begin in range(0, exps.shape[-1], SPLIT):
        part = exps[..., begin : begin + SPLIT]
        part_total = part.sum(dim=-1, keepdim=True)  # of the unrounded probabilities
        if rounds_probabilities:
            part = round_bf16_(part.contiguous())
        part_out = torch.bmm(part, values[:, begin : begin + SPLIT])
        total = part_total if total is None else total + part_total
        out = part_out if out is None else out + part_out
    assert total is not None and out is not None, "a page table has at least one page"
    return out / total


def read_pages(pages: Pages, page_table: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather and decode the pages of every sequence: [C, B, N*S, D] in `dtype`."""
    if isinstance(pages, Tensor):
        return _gather(pages, page_table).to(dtype)
    found, scale_bytes = _gather(pages.packed, page_table), _gather(pages.block_scales, page_table)
    if isinstance(pages, FragmentPages):
        plain = from_fragments(replace(pages, packed=found, block_scales=scale_bytes))
        found, scale_bytes = plain.packed, plain.block_scales
    num_kv, num_seqs, length, width = found.shape
    pairs = _pair_table(found.device).index_select(0, found.to(torch.int32).view(-1))
    values = pairs.view(torch.float32).to(dtype)
    decode_scales = _scale_table(int(pages.outer), dtype, scale_bytes.device)
    decode_scales = decode_scales.index_select(0, scale_bytes.to(torch.int32).view(-1))
    values.view(-1, BLOCK_SIZE).mul_(decode_scales[:, None])
    return values.view(num_kv, num_seqs, length, 2 * width)


def _gather(pages: Tensor, page_table: Tensor) -> Tensor:
    """Copy whole pages: [C, F, S, W] at [B, N] -> [C, B, N*S, W]."""
    num_kv, num_frames, page_size, width = pages.shape
    num_seqs, num_pages = page_table.shape
    found = pages.view(num_kv, num_frames, page_size * width).index_select(1, page_table.reshape(-1))
    return found.view(num_kv, num_seqs, num_pages * page_size, width)


@lru_cache(maxsize=4)
def _pair_table(device: torch.device) -> Tensor:
    """int64 [256]: the bits of the two float32 values of every byte, low nibble first."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    pairs = decode_e2m1(torch.stack([byte & 15, byte >> 4], dim=-1), torch.float32)
    return pairs.contiguous().view(torch.int64).view(-1).to(device)


@lru_cache(maxsize=4096)
def _scale_table(exponent: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: decoded E4M3 byte times 2^exponent; exact, because the product is a power-of-two shift."""
    decoded = decode_e4m3(torch.arange(256, dtype=torch.uint8, device="cpu"), torch.float64)
    return (decoded * 2.0**exponent).to(dtype).to(device)
