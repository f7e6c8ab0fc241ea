"""Synthetic activations that differ at every position, and records of them made by the real rounding path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.guidance import Record, RecordIdentity, SequenceRows, Site, StepLog, round_site, route_site
from tracefp4.guidance.record import SITE_KINDS
from tracefp4.guidance.session import record
from tracefp4.ops.guided_quantize import Rounded

X0, X1, K0, W0 = Site("x", 0), Site("x", 1), Site("k", 0), Site("w2", 0)
WIDTH = 32
NUM_EXPERTS = 8
TOP_K = 2
KV_EXPONENT = -2


def activations(
    trajectory: int, positions: Sequence[int] | Tensor, *, site: Site = X0, rows: int = 1
) -> Tensor:
    """Values [n * rows, WIDTH] that depend on (trajectory, position, site) alone; bf16 numbers in float32."""
    found = []
    for position in torch.as_tensor(positions).tolist():
        seed = 1_000_003 * trajectory + 101 * position + 7 * site.layer + SITE_KINDS.index(site.kind)
        found.append(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)))
    stacked = torch.cat(found) if found else torch.zeros(0, WIDTH)
    return stacked.bfloat16().float()


def router_logits(trajectory: int, positions: Sequence[int] | Tensor, *, layer: int = 0) -> Tensor:
    """Logits [n, NUM_EXPERTS] that depend on (trajectory, position, layer) alone."""
    found = []
    for position in torch.as_tensor(positions).tolist():
        seed = 7919 * trajectory + 31 * position + layer
        found.append(torch.randn(1, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed)))
    return torch.cat(found) if found else torch.zeros(0, NUM_EXPERTS)


def round_at(site: Site, x: Tensor) -> Rounded:
    """Round x at a site under the scheme that its kind uses."""
    if site.kind in ("k", "v"):
        return round_site(x, site=site, scheme=NVFP4_KV, exponent=KV_EXPONENT)
    return round_site(x, site=site, scheme=NVFP4_ROW_POW2)


def identity(trajectory: int = 0, *, weight_versions: Tensor | int = 3) -> RecordIdentity:
    """An identity with fixed digests."""
    return RecordIdentity(
        trajectory=f"prompt0/sample{trajectory}",
        weight_versions=weight_versions,
        scheme_digest="5c4e3e0000000001",
        plan_digest="91a0000000000002",
    )


def recorded(
    trajectory: int = 0,
    *,
    length: int = 10,
    start: int = 0,
    sites: Sequence[Site] = (X0, X1, K0, W0),
    routed_layers: Sequence[int] = (0, 1),
    weight_versions: Tensor | int = 3,
) -> Record:
    """A full record of the positions start .. start+length-1, observed in two engine steps."""
    log = StepLog(sites=sites, routed_layers=routed_layers, num_experts=NUM_EXPERTS)
    cut = length // 2
    for positions in (range(start, start + cut), range(start + cut, start + length)):
        log.begin_step(num_tokens=len(positions))
        with record(log):
            for site in sites:
                rows = TOP_K if site.kind == "w2" else 1
                round_at(site, activations(trajectory, positions, site=site, rows=rows))
            for layer in routed_layers:
                route_site(layer, router_logits(trajectory, positions, layer=layer), top_k=TOP_K)
        log.end_step()
    rows = SequenceRows(
        identity=identity(trajectory, weight_versions=weight_versions), rows=range(length), start=start
    )
    return log.build([rows])[0]
