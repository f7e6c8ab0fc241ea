"""One definition of rounding and of routing at a site, used by engine and trainer alike.

Without a session a site rounds to nearest (plain QAT) and a router is live. Under `record` it does the same
and tells the sink. Under `replay` it follows the record where one is valid, rounds to nearest elsewhere, and
counts both; a wrong number of rows or an impossible expert id raises. Gradients are the caller's: these
functions detach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.scheme import Scheme
from tracefp4.guidance.counters import Reference, RoutingCounts, SiteCounts, compare
from tracefp4.guidance.noise import measure_noise
from tracefp4.guidance.rates import Rule, num_wrong
from tracefp4.guidance.record import Site
from tracefp4.guidance.replay import ReplayBatch
from tracefp4.guidance.session import current
from tracefp4.ops.guided_quantize import Rounded, guided_quantize
from tracefp4.ops.saturation import saturation


def round_site(
    x: Tensor, *, site: Site, scheme: Scheme, exponent: int | None = None, with_codes: bool = True
) -> Rounded:
    """Round x at a site as the running session asks.

    Args:
        x: [N, K] float; under replay N = B*T * rows_per_token in row-major order. N = 0 is fine.
        site: where.
        scheme: how.
        exponent: power of two of a static outer scale; None for other schemes.
        with_codes: False if the caller only reads values; codes are then made only if the session needs them.
    Raises: RecordError under replay if N does not fit the batch or the record's static exponent is another.
    """
    session = current()
    if session is not None and session.batch is not None:
        return _replayed(x, site, scheme, exponent, with_codes, session.batch)
    is_recorded = session is not None and session.sink is not None
    rounded = guided_quantize(x, scheme=scheme, exponent=exponent, with_codes=with_codes or is_recorded)
    if session is not None and session.sink is not None:
        session.sink.observe(site, rounded)
    return rounded


def route_site(layer: int, logits: Tensor, *, top_k: int) -> Tensor:
    """Choose experts as the running session asks.

    Live: the top_k largest logits in descending order, the lowest id first among equals. Under replay a place
    with a record takes the recorded ids in recorded order, and padding takes `spread_ids` (whether routing is
    replayed or not), so it loads no expert more than others; a real place without a record stays live.

    Args: layer: decoder layer. logits: [N, E]; under replay N = B*T. top_k: experts per token, 1 .. E.
    Returns: int64 [N, top_k], no gradient.
    Raises: ConfigError if top_k is not in 1 .. E; RecordError for a wrong N, another recorded top_k, or
    impossible recorded ids.
    """
    num_experts = logits.shape[-1]
    if not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"A router cannot choose {top_k} of {num_experts} experts; got top_k {top_k} at layer {layer}. "
            f"top_k lies in 1..{num_experts}. Correct the model config."
        )
    live = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    session = current()
    if session is not None and session.batch is not None:
        return _rerouted(live, layer=layer, num_experts=num_experts, batch=session.batch)
    if session is not None and session.sink is not None:
        session.sink.observe_routing(layer, live)
    return live


def spread_ids(rows: Tensor, *, num_experts: int, top_k: int) -> Tensor:
    """Harmless experts for padding: padding row p, slot c takes (p * top_k + c) mod num_experts.

    Distinct within a row, in range, and over rows 0 .. P-1 every expert gets the same share, up to one.

    Args: rows: int64 [P], numbers of the padding rows. Returns: int64 [P, top_k].
    """
    return (rows[:, None] * top_k + torch.arange(top_k, device=rows.device)) % num_experts


def _replayed(
    x: Tensor, site: Site, scheme: Scheme, exponent: int | None, with_codes: bool, batch: ReplayBatch
) -> Rounded:
    guide = batch.guide(site)
    reference = batch.reference(site)
    expected = batch.num_places if guide is None else guide.valid.shape[0]
    if x.shape[0] != expected and (
        guide is not None or batch.num_places == 0 or x.shape[0] % batch.num_places
    ):
        raise RecordError(
            f"Site {site} does not fit the replayed batch; got {x.shape[0]} rows. The batch has "
            f"{batch.num_places} places and needs {expected} rows here. Build the ReplayBatch from this "
            "micro-batch's positions."
        )
    if guide is not None:
        _check_static_exponent(site, recorded=batch.static_exponent(site), given=exponent)
    needs_codes = with_codes or reference is not None
    rounded = guided_quantize(x, scheme=scheme, guide=guide, exponent=exponent, with_codes=needs_codes)
    measured: dict[str, Tensor] = {}
    if reference is not None:
        _check_static_exponent(site, recorded=reference.part.static_exponent, given=exponent)
        nearest = rounded if guide is None else guided_quantize(x, scheme=scheme, exponent=exponent)
        measured = compare(rounded=rounded, nearest=nearest, reference=reference)
        rule = Rule(scheme=scheme, exponent=exponent, decoder=batch.decoder, band=batch.band(site))
        _measure(x, nearest.outer, reference, site=site, rule=rule, batch=batch)
    if batch.counts_saturation:
        is_measured = guide is None or reference is not None
        measured |= _ends(x, rounded, scheme, looks_at_all=guide is not None and is_measured, batch=batch)
        if not is_measured:
            del measured["values_clipped"]  # among recorded scales, only a look at all values would find them
    rows_per_place = x.shape[0] // max(1, batch.num_places)
    guided = batch.num_guided(site)
    batch.counters.sites[site] = SiteCounts(
        values=batch.num_real * rows_per_place * x.shape[1],
        positions=batch.num_real,
        positions_guided=guided,
        positions_missing=batch.num_real - guided,
        values_changed=rounded.nearest_changed,
        values_in_band=rounded.in_band,
        syndrome_blocks=batch.syndrome_blocks(site),
        blocks_undecoded=rounded.undecoded,
        blocks=batch.num_real * rows_per_place * rounded.block_scales.shape[1] * batch.counts_saturation,
        **measured,
    )
    return rounded


def _ends(
    x: Tensor, rounded: Rounded, scheme: Scheme, *, looks_at_all: bool, batch: ReplayBatch
) -> dict[str, Tensor]:
    """Count what a rounding could not represent; the keys are fields of SiteCounts."""
    rows_per_place = x.shape[0] // max(1, batch.num_places)
    found = saturation(
        x,
        (rounded.block_scales, rounded.outer),
        scheme,
        is_recorded=looks_at_all,
        rows=batch.real[:, None].expand(-1, rows_per_place).reshape(-1),
    )
    return {
        "blocks_clamped": found.blocks_clamped,
        "blocks_floored": found.blocks_floored,
        "values_clipped": found.values_clipped,
    }


def _measure(
    x: Tensor, outer: Tensor, reference: Reference, *, site: Site, rule: Rule, batch: ReplayBatch
) -> None:
    """Count noise, and what the candidates would leave wrong, into the batch's counters."""
    counters = batch.counters
    counters.noise[site] = measure_noise(x, scheme=rule.scheme, outer=outer, reference=reference)
    if batch.candidates:
        counters.residuals[site] = num_wrong(
            x, reference.part, codecs=batch.candidates, rule=rule, valid=reference.valid
        )


def _check_static_exponent(site: Site, *, recorded: int | None, given: int | None) -> None:
    if recorded is not None and recorded != (given or 0):
        raise RecordError(
            f"Site {site} was recorded under another static outer scale: its exponent is {recorded}, this "
            f"side's is {given}. Both must be equal. Share one calibration between engine and trainer, or "
            "record again."
        )


def _rerouted(live: Tensor, *, layer: int, num_experts: int, batch: ReplayBatch) -> Tensor:
    found = batch.routing(layer, num_experts=num_experts)
    if live.shape[0] != batch.num_places or (found is not None and found[0].shape[1] != live.shape[1]):
        shape = None if found is None else tuple(found[0].shape)
        raise RecordError(
            f"Router of layer {layer} does not fit the replayed batch; got {tuple(live.shape)} for "
            f"{batch.num_places} places and recorded ids of shape {shape}. Both must be equal. Build the "
            "ReplayBatch from this micro-batch's positions, with records of this model."
        )
    chosen, replayed, changed = live, live.new_zeros(()), live.new_zeros(())
    if found is not None:
        recorded, valid = found
        chosen = torch.where(valid[:, None], recorded, live)
        replayed = valid.sum()
        # ids of a row are distinct, so two sets of one size differ where one id is not in the other
        changed = (~(chosen.unsqueeze(-1) == live.unsqueeze(-2)).any(-1).all(-1)).sum()
    batch.counters.routing[layer] = RoutingCounts(
        positions=batch.num_real, positions_replayed=replayed, positions_changed=changed
    )
    if batch.num_real == batch.num_places:
        return chosen
    padding_rows = (~batch.real).cumsum(0) - 1
    fill = spread_ids(padding_rows, num_experts=num_experts, top_k=live.shape[1])
    return torch.where(batch.real[:, None], chosen, fill)
