"""Native passes by hand: batches of decoding rows, pools, and what a definition computes that follows a record."""

import torch

from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.session import replay
from tracefp4.kvcache import CacheShape, KVPool
from tracefp4.models import Segment, TokenBatch

# Logits are rounded to bf16 (2^-9 of them), after two layers in which the residual stream and what is added to it are
# rounded a dozen times: a few times 2^-9 of the largest logit.
LOGITS_CLOSE = 2.0**-6


def new_pool(model, *, num_pages=16, page_size=4):
    sizes = model.sizes
    shape = CacheShape(
        num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, num_pages=num_pages, page_size=page_size
    )
    return KVPool(shape, precision=model.precision, arithmetic=model.arithmetic, device=model.device)


def decoding(pool, token_ids, *, position, padding=0):
    """One decoding segment: sequence i holds page i; `padding` rows at the end fill it up."""
    count, size = len(token_ids), pool.shape.page_size
    frames = torch.tensor([*range(count), *[pool.null_frame] * padding])
    positions = torch.tensor([position] * count + [0] * padding)
    slots = torch.where(frames == pool.null_frame, -1, frames * size + positions)
    segment = Segment(
        begin=0,
        end=count + padding,
        page_table=frames[:, None],
        positions=positions[:, None],
        places=None,
    )
    return TokenBatch(
        token_ids=torch.tensor([*token_ids, *[0] * padding]),
        positions=positions,
        slots=slots,
        segments=[segment],
        logit_rows=torch.arange(count + padding),
    ).to(pool.device)


def logits_of(model, batch, pool):
    return model.forward(batch, pool)


def stored_bytes(pool):
    """Codes and scale bytes of every layer's K and V, [C, F, S, W]."""
    parts = [part for layer in pool.layers for part in (layer.keys, layer.values)]
    return [stored for part in parts for stored in (part.packed, part.block_scales)]


def following(definition, tokens, record):
    """Logits [n, V] of the definition, which takes the recorded decisions of the first n tokens."""
    count = record.length
    pool = new_pool(definition, num_pages=-(-count // 4))
    positions = torch.arange(count)[None]
    segment = Segment(
        begin=0,
        end=count,
        page_table=torch.arange(pool.shape.num_pages)[None],
        positions=positions,
        places=None,
    )
    batch = TokenBatch(
        token_ids=torch.tensor(tokens[:count]),
        positions=positions[0],
        slots=positions[0],
        segments=[segment],
        logit_rows=positions[0],
    )
    with replay(ReplayBatch(positions=positions, records=[record])):
        return definition.forward(batch, pool)


def relative_error(found, wanted):
    """Largest difference of two sets of logits, in units of the largest logit."""
    return float((found.cpu().float() - wanted.cpu().float()).abs().max() / wanted.abs().max())
