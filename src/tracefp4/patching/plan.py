"""Which modules become FP4, which decisions are recorded, and why: a plan is data, inspected before it is applied.

`plan(model, rules)` lists every module with its decision and the reason, and refuses to select nothing. The
same plan is applied in trainer and engine, and its digest is part of every record: a record made under
another plan is refused. The decision rule itself (module name to decision) lives in `patching.rules`, which
also serves models known by name only.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from tracefp4.coding import codec_by_name
from tracefp4.errors import ConfigError
from tracefp4.formats import BF16_LAYER, LayerPrecision, Scheme
from tracefp4.formats.precision import PARTS, scheme_digest
from tracefp4.guidance import Site
from tracefp4.guidance.record import SiteKind
from tracefp4.patching.budget import check_block
from tracefp4.patching.rules import AUTO, ModuleDecision, PlanRules, decide, guided_layers
from tracefp4.patching.schemes import can_follow, check_codec, check_recordable, part_scheme

SUPPORTED_ARCHITECTURES = ("Qwen3MoeForCausalLM", "OlmoeForCausalLM", "Qwen3_5MoeForCausalLM")
"""What a plan can be made and carried out for, and a run can train and sample from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One model's decisions: data, comparable, with a digest that both sides of a run must share."""

    rules: PlanRules
    """The options this plan was made from."""
    architecture: str
    """Class name of the model."""
    decisions: tuple[ModuleDecision, ...]
    """Every leaf module (and every fused experts module), in model order."""
    layers: tuple[LayerPrecision, ...]
    """Precision of each decoder layer, index = layer."""
    guided_sites: tuple[Site, ...]
    """Sites that the rollout records and the trainer follows; empty for nearest rounding."""
    codecs: Mapping[Site, str] = field(default_factory=dict, hash=False)
    """Codec of every guided site. Under one codec for all it follows from the rules; under `guidance = "auto"` it is
    empty until `with_codecs` puts in what a calibration chose. Empty without guidance."""
    digest: str = field(default="")
    """16 hex characters over architecture and layer precisions, what the rollout computes; under `guidance = "auto"`
    over the chosen codecs as well, because the choice is part of the plan. A fixed codec is not in it."""

    def __post_init__(self) -> None:
        if self.rules.guidance != AUTO:
            object.__setattr__(self, "codecs", dict.fromkeys(self.guided_sites, self.rules.guidance))
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self))

    @property
    def num_quantized(self) -> int:
        """Count of modules that become FP4."""
        return sum(decision.is_quantized for decision in self.decisions)

    @property
    def scheme_digest(self) -> str:
        """Digest of the schemes in use, over all layers (`formats.precision.scheme_digest`)."""
        return scheme_digest(self.layers)

    @property
    def static_exponents(self) -> dict[Site, int]:
        """Power-of-two outer scale of every site that has a static one."""
        sites = (Site(kind=part, layer=i) for i in range(len(self.layers)) for part in PARTS)
        found = {site: self.layers[site.layer].exponent_of(site.kind) for site in sites}
        return {site: exponent for site, exponent in found.items() if exponent is not None}

    @property
    def needs_calibration(self) -> bool:
        """True under `guidance = "auto"` before a codec was chosen for the guided sites: what the rollout records is
        then `full`, and nothing can be recoded for training."""
        return bool(self.guided_sites) and not self.codecs

    def can_follow(self, codec: str) -> bool:
        """Return whether records in this codec can be decoded at every guided site."""
        schemes = (self.layers[site.layer].scheme_of(site.kind) for site in self.guided_sites)
        return all(scheme is None or can_follow(scheme, codec) for scheme in schemes)

    def with_codecs(self, codecs: Mapping[Site, str]) -> "Plan":
        """Return the plan with the codecs that a calibration chose; its digest differs from that of other choices.

        Args:
            codecs: name of a codec for every guided site and no other.

        Raises:
            ConfigError: the plan's rules name one codec for all, a site is missing or not guided, or an unknown codec.
        """
        if self.rules.guidance != AUTO:
            raise ConfigError(
                f"plan: codecs cannot be chosen by site; got {len(codecs)} for a plan with guidance "
                f'{self.rules.guidance!r}. Only guidance = "auto" takes them. Set quantization.guidance to auto.'
            )
        if set(codecs) != set(self.guided_sites):
            odd = sorted(set(codecs) ^ set(self.guided_sites))
            raise ConfigError(
                f"plan: codecs do not fit the guided sites; got {len(codecs)} codecs, missing or not guided are "
                f"{[str(site) for site in odd]}. Every one of the {len(self.guided_sites)} guided sites needs one. "
                "Choose from a calibration of this plan."
            )
        for name in codecs.values():
            codec_by_name(name)
        return replace(self, codecs={site: codecs[site] for site in self.guided_sites}, digest="")

    def with_exponents(self, exponents: Mapping[Site, int]) -> "Plan":
        """Return the plan with these static outer scales; sites that have none are left alone."""
        static = self.static_exponents
        changes: list[dict[str, int]] = [{} for _ in self.layers]
        for site, exponent in exponents.items():
            if site in static:
                changes[site.layer][f"{site.kind}_exponent"] = exponent
        layers = tuple(replace(layer, **found) for layer, found in zip(self.layers, changes, strict=True))  # type: ignore[arg-type]
        return replace(self, layers=layers, digest="")

    def without_guidance(self) -> "Plan":
        """Return the plan that rounds to nearest everywhere (deployment, and the QAT arm)."""
        return replace(
            self,
            rules=replace(self.rules, guidance="none", gate="none"),
            guided_sites=(),
            codecs={},
            digest="",
        )

    def summary(self) -> dict[str, object]:
        """Return the plan as plain data for the run manifest."""
        return {
            "digest": self.digest,
            "scheme_digest": self.scheme_digest,
            "architecture": self.architecture,
            "rules": asdict(self.rules),
            "num_quantized_modules": self.num_quantized,
            "guided_sites": [f"{site.layer}.{site.kind}" for site in self.guided_sites],
            "codecs": {f"{site.layer}.{site.kind}": name for site, name in self.codecs.items()},
            "needs_calibration": self.needs_calibration,
            "num_layers": len(self.layers),
            "static_exponents": {f"{s.layer}.{s.kind}": k for s, k in self.static_exponents.items()},
        }


def _digest(plan: Plan) -> str:
    """Digest of what a rollout under this plan computes: the model's class and the precision of every layer.

    How the trainer follows the records (codec, gate, decoder, sites, straight-through options) is not part of it: the
    same rollout may be followed in several ways, and is when they are compared. Codecs that a calibration chose are
    part of it: records of another choice are refused by digest, not found out site by site.
    """

    def name(scheme: Scheme | None) -> str:
        return "bf16" if scheme is None else scheme.digest

    layers = [
        [name(s.activation), name(s.weight), name(s.kv), *(s.exponent_of(part) or 0 for part in PARTS)]
        for s in plan.layers
    ]
    content: list[Any] = [plan.architecture, layers]
    if plan.rules.guidance == AUTO and plan.codecs:
        content.append([[str(site), name] for site, name in sorted(plan.codecs.items())])
    text = json.dumps(content)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def plan(model: nn.Module, rules: PlanRules) -> Plan:
    """List every module of `model` with its decision, and derive the precision of each layer.

    Args:
        model: a transformers causal LM of a supported mixture-of-experts architecture.
        rules: the options; `mode="bf16"` makes a plan that quantizes nothing on purpose.

    Raises:
        ConfigError: an unsupported architecture, adapters that are not merged, a quantized dimension that is not a
            multiple of the block, a scheme at a site it cannot serve or cannot be guided at, a codec that cannot be
            decoded under a site's scheme, an exclude pattern that matches nothing, or rules that ask for FP4 and select
            no module or for guidance and select no site.
    """
    architecture = type(model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"plan: {architecture} is not a supported mixture-of-experts model; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Pass a checkpoint of one of these."
        )
    check_adapters(model)
    config: Any = model.config
    names = [
        n for n, m in model.named_modules() if n and (not any(True for _ in m.children()) or _is_experts(m))
    ]
    names = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    decisions = decide(names, num_layers=config.num_hidden_layers, rules=rules)
    layers = tuple(_layer_precision(i, decisions, rules) for i in range(config.num_hidden_layers))
    if rules.mode == "fp4" and all(layer == BF16_LAYER for layer in layers):
        raise ConfigError(
            f"plan: FP4 was asked for and no module of {architecture} was selected "
            f"(exclude={list(rules.exclude)}, "
            f"last_layers_bf16={rules.last_layers_bf16} of {config.num_hidden_layers} layers). "
            'Relax the rules, or say mode = "bf16".'
        )
    _check_dimensions(config, layers)
    return Plan(
        rules=rules,
        architecture=architecture,
        decisions=decisions,
        layers=layers,
        guided_sites=_guided(layers, rules),
    )


def check_adapters(model: nn.Module) -> None:
    """Refuse a model that carries adapters: their sum is not a parameter, so no FP4 copy could stand for it.

    Raises:
        ConfigError: a module wraps another one as its `base_layer`, as PEFT does.
    """
    wrapped = next((name for name, module in model.named_modules() if hasattr(module, "base_layer")), None)
    if wrapped is not None:
        raise ConfigError(
            f"plan: {wrapped} carries an adapter; got a module with a base_layer (PEFT). Weights are quantized as they "
            "are stored, and engine and export would not see the adapter. Merge it first (merge_and_unload)."
        )


def _is_experts(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _layer_precision(index: int, decisions: tuple[ModuleDecision, ...], rules: PlanRules) -> LayerPrecision:
    chosen = {d.kind for d in decisions if d.is_quantized and d.layer == index}
    return LayerPrecision(
        activation=part_scheme("activation", rules.activation) if "experts" in chosen else None,
        weight=part_scheme("weight", rules.weight) if "experts" in chosen else None,
        kv=part_scheme("kv", rules.kv) if "kv" in chosen else None,
    )


def _guided(layers: tuple[LayerPrecision, ...], rules: PlanRules) -> tuple[Site, ...]:
    if rules.guidance == "none" or rules.mode == "bf16":
        return ()
    chosen = guided_layers(rules.layers, num_layers=len(layers))
    sites = []
    kinds: tuple[SiteKind, ...] = rules.sites  # type: ignore[assignment]  # checked by PlanRules
    for i in chosen:
        for kind in kinds:
            scheme = layers[i].scheme_of(kind)
            if scheme is not None:
                check_recordable(f"{i}.{kind}", scheme)
                if rules.guidance != AUTO:
                    check_codec(f"{i}.{kind}", scheme, rules.guidance)
                sites.append(Site(kind=kind, layer=i))
    if not sites:
        raise ConfigError(
            f"plan: guidance {rules.guidance!r} selects no site (sites={list(rules.sites)}, "
            f"layers={rules.layers!r}). "
            'Name at least one quantized site, or say guidance = "none".'
        )
    return tuple(sites)


def _check_dimensions(config: Any, layers: tuple[LayerPrecision, ...]) -> None:
    """Refuse a width that a scheme's block does not divide, naming the modules."""
    # OLMoE calls the inner width of an expert as others do that of a dense MLP, and names no head dim
    name = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = {"hidden_size": config.hidden_size, name: getattr(config, name)}
    for i, layer in enumerate(layers):
        for scheme in (layer.activation, layer.weight):
            if scheme is not None:
                check_block(
                    inner, block=scheme.block_size, module=f"model.layers.{i}.mlp.experts ({scheme.name})"
                )
        if layer.kv is not None:
            module = f"model.layers.{i}.self_attn.kv_cache ({layer.kv.name})"
            check_block({"head_dim": head_dim}, block=layer.kv.block_size, module=module)
