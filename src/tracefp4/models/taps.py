"""What a pass of kernels rounded and routed, collected as bytes in layer order and handed over in a few tensors.

A tap keeps references to bytes that kernels wrote anyway: `keep` launches nothing, and `stacked` as many copies as
there are kinds of parts, whatever the number of layers. Everything stays on the device and nothing asks the host, so a
pass with taps can be captured in a CUDA graph. What becomes of the bytes is the recorder's business.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracefp4.coding import expert_id_bytes
from tracefp4.errors import ConfigError
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance.record import SITE_KINDS, Site, SiteKind
from tracefp4.guidance.session import Sink
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.guided_quantize import Rounded


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StackedSite:
    """The recorded rows of one kind of site, all layers of a pass.

    S layers, R rows of W values: T rows for x, k and v (all kv heads of a token side by side), T * J rows, token-major,
    for w2. Blocks of B values as the scheme says.
    """

    layers: tuple[int, ...]
    """Decoder layer of each of the S entries, ascending."""
    packed: Tensor
    """uint8 [S, R, W / 2], codes in plain order: the payload of codec `full`."""
    block_scales: Tensor
    """uint8 [S, R, W / B], scale bytes as they are."""
    exponents: Tensor | None
    """int8 [S, R], power of two of every row; None for schemes with a static outer scale or none."""
    static_exponents: tuple[int, ...] | None
    """Power of two of every layer, 0 for schemes without one; None for row schemes."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StackedTaps:
    """All that one pass recorded."""

    sites: Mapping[SiteKind, StackedSite]
    """By kind, those kinds only that any layer records."""
    routed_layers: tuple[int, ...]
    """Decoder layers whose routing is recorded, ascending; empty if none is."""
    ids: Tensor | None
    """[routed layers, T, J], expert ids, as many bytes each as `coding.expert_id_bytes` says (uint8 or int16); None
    if no routing is recorded."""


class Taps:
    """Bytes of one pass; made anew for every pass (or every capture of one).

    Args:
        sites: what to record; each must be rounded by its layer. Sites of one kind share a scheme.
        precision: one entry per decoder layer.
        routed_layers: layers whose expert ids are recorded.
        num_experts: sets the bytes of an id.

    Raises: ConfigError for a site that its layer does not round, or for sites of one kind under several schemes, whose
        rows cannot lie in one tensor.
    """

    def __init__(
        self,
        sites: Collection[Site],
        *,
        precision: Sequence[LayerPrecision],
        routed_layers: Sequence[int],
        num_experts: int,
    ) -> None:
        self._precision = precision
        self._rows: dict[Site, BlockTensor | None] = dict.fromkeys(sorted(sites))
        self._ids: dict[int, Tensor | None] = dict.fromkeys(sorted(routed_layers))
        self._id_dtype = torch.uint8 if expert_id_bytes(num_experts) == 1 else torch.int16
        for kind in SITE_KINDS:
            self._check_schemes(kind)

    def __contains__(self, site: Site) -> bool:
        return site in self._rows

    def keep(self, site: Site, rows: BlockTensor) -> None:
        """Keep the bytes of a site, [R, W] or (k and v) [T, C, D]; those of other sites are left alone."""
        if site in self._rows:
            assert self._rows[site] is None, f"{site} was tapped twice in a pass"
            self._rows[site] = rows

    def keep_routing(self, layer: int, ids: Tensor) -> None:
        """Keep the routed ids int64 [T, J] of a layer, if they are recorded."""
        if layer in self._ids:
            assert self._ids[layer] is None, f"routing of layer {layer} was tapped twice in a pass"
            self._ids[layer] = ids

    def stacked(self) -> StackedTaps:
        """Return everything in one tensor per part; the pass must have reached every recorded site."""
        kinds = {site.kind for site in self._rows}
        ids = [found for found in self._ids.values() if found is not None]
        assert len(ids) == len(self._ids), "a pass taps every routed layer once"
        return StackedTaps(
            sites={kind: self._stacked_site(kind) for kind in SITE_KINDS if kind in kinds},
            routed_layers=tuple(self._ids),
            ids=torch.stack(ids).to(self._id_dtype) if ids else None,
        )

    def tell(self, sink: Sink) -> None:
        """Tell a session's sink what a pass rounded and routed, as `guidance.rounding` does at every site."""
        for site, found in self._rows.items():
            assert found is not None, f"a pass taps {site} once"
            device = found.packed.device
            rows = replace(
                found,
                packed=found.packed.flatten(1),
                block_scales=found.block_scales.flatten(1),
                outer=found.outer.to(device),
            )
            sink.observe(
                site,
                Rounded(
                    values=dequantize(rows, dtype=torch.bfloat16),
                    codes=rows.codes(),
                    block_scales=rows.block_scales,
                    outer=rows.outer,
                    nearest_changed=torch.zeros((), dtype=torch.int64, device=device),
                ),
            )
        for layer, ids in self._ids.items():
            assert ids is not None, f"a pass taps the routing of layer {layer} once"
            sink.observe_routing(layer, ids)

    def _stacked_site(self, kind: SiteKind) -> StackedSite:
        found = {site.layer: rows for site, rows in self._rows.items() if site.kind == kind}
        rows = [part for part in found.values() if part is not None]
        assert len(rows) == len(found), f"a pass taps {kind} of every recorded layer once"
        is_row = rows[0].scheme.outer == "row"
        exponents = tuple(self._precision[layer].exponent_of(kind) or 0 for layer in found)
        return StackedSite(
            layers=tuple(found),
            packed=torch.stack([part.packed.flatten(1) for part in rows]),
            block_scales=torch.stack([part.block_scales.flatten(1) for part in rows]),
            exponents=torch.stack([part.outer for part in rows]) if is_row else None,
            static_exponents=None if is_row else exponents,
        )

    def _check_schemes(self, kind: SiteKind) -> None:
        layers = [site.layer for site in self._rows if site.kind == kind]
        schemes = {self._precision[layer].scheme_of(kind) for layer in layers}
        if len(schemes) > 1 or None in schemes:
            names = sorted("bf16" if scheme is None else scheme.name for scheme in schemes)
            raise ConfigError(
                f"The bytes of {kind} cannot be recorded in layers {layers}; got schemes {names}. Allowed is one "
                f"scheme in every layer that records {kind}, and none may be bf16. Plan one, or record other sites."
            )
