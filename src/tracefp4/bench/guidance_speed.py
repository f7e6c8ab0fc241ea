"""How fast a codec is on the values that it serves: the expert input of one layer, rollout's and trainer's.

Encoding is `recode_all` of whole records, on the CPU where records live. Decoding is the guided rounding of the
trainer's own values under the recoded records, scales included. The best of a few rounds counts. Nothing here says how
close the result is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench.clock import best_seconds
from tracefp4.formats import Scheme
from tracefp4.guidance import Record, ReplayBatch, Site
from tracefp4.guidance.joining import recode_all
from tracefp4.ops.guided_quantize import guided_quantize
from tracefp4.patching import Plan
from tracefp4.rl.batching import pad
from tracefp4.rl.same_tokens import SameTokens
from tracefp4.rl.samples import TrainingSample

ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteValues:
    """The trainer's values at one site, and the rollout's records of it."""

    x: Tensor
    """[N, K] in the trainer's dtype, on its device."""
    positions: Tensor
    """int64 [B, T] on the same device, N = B * T."""
    records: tuple[Record, ...]
    """Whole records of this site alone, one per row of `positions`."""
    site: Site
    """Which one."""
    scheme: Scheme
    """How it is rounded."""

    def rates(self, codec: str) -> tuple[float, float]:
        """Return (encode, decode) in million values per second."""
        (recoded, seconds) = _timed(lambda: recode_all(self.records, codec), device=torch.device("cpu"))
        guide = ReplayBatch(positions=self.positions, records=recoded).guide(self.site)
        _, decode_s = _timed(
            lambda: guided_quantize(self.x, scheme=self.scheme, guide=guide, with_codes=False),
            device=self.x.device,
        )
        encoded = sum(record.length for record in self.records) * self.x.shape[1]
        return encoded / seconds / 1e6, self.x.numel() / decode_s / 1e6


def site_values(bed: SameTokens, followed: Plan, samples: Sequence[TrainingSample]) -> SiteValues:
    """Catch the expert input of the middle layer in one pass of the trainer.

    Args:
        bed: the model.
        followed: a guided plan.
        samples: with whole records; as many as one micro-batch takes are used.
    """
    longest = max(sample.num_tokens for sample in samples)
    used = list(samples[: max(1, bed.micro_batch_tokens // longest)])
    site = Site("x", len(followed.layers) // 2)
    caught: list[Tensor] = []
    with bed.trainer(followed) as trainer:
        module = _experts(trainer.applied.model, site.layer)
        settings = module.tracefp4
        module.tracefp4 = replace(
            settings, observer=lambda at, x: caught.append(x.clone()) if at == site else None
        )
        try:
            trainer.score(used)
        finally:
            module.tracefp4 = settings
        device = caught[0].device
    scheme = followed.layers[site.layer].activation
    assert scheme is not None, "the plan quantizes activations"
    order = sorted(range(len(used)), key=lambda i: -used[i].num_tokens)
    ordered = [used[i] for i in order]
    records = [sample.record for sample in ordered if sample.record is not None]
    return SiteValues(
        x=caught[0],
        positions=pad(ordered, pad_id=0).positions.to(device),
        records=tuple(replace(record, sites={site: record.sites[site]}, routed=None) for record in records),
        site=site,
        scheme=scheme,
    )


def _experts(model: Any, layer: int) -> Any:
    return model.get_submodule(f"model.layers.{layer}.mlp.experts")


def _timed(call: Any, *, device: torch.device) -> tuple[Any, float]:
    def waited() -> Any:
        found = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    return waited(), best_seconds({"call": waited}, rounds=ROUNDS)["call"]
