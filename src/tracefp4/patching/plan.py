"""Which modules become FP4, which decisions are recorded, and why: a plan is data, inspected before it is applied.

`plan(model, rules)` lists every module with its decision and the reason, and refuses to select nothing. The
same plan is applied in trainer and engine, and its digest is part of every record: a record made under
another plan is refused. The decision rule itself (module name to decision) lives in `patching.rules`, which
also serves models known by name only.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.formats import BF16_LAYER, LayerPrecision, Scheme, scheme_by_name
from tracefp4.guidance import Site
from tracefp4.guidance.record import SiteKind
from tracefp4.patching.budget import check_block
from tracefp4.patching.rules import ModuleDecision, PlanRules, decide, guided_layers

SUPPORTED_ARCHITECTURES = ("Qwen3MoeForCausalLM",)


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
    digest: str = field(default="")
    """16 hex characters over architecture and layer precisions: what the rollout computes."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self))

    @property
    def num_quantized(self) -> int:
        """Count of modules that become FP4."""
        return sum(decision.is_quantized for decision in self.decisions)

    @property
    def scheme_digest(self) -> str:
        """Digest of the schemes in use, joined in the order activation, weight, kv."""
        layer = next((layer for layer in self.layers if layer != BF16_LAYER), BF16_LAYER)
        schemes = (layer.activation, layer.weight, layer.kv)
        return "-".join("bf16" if scheme is None else scheme.digest for scheme in schemes)

    def with_kv_exponents(self, exponents: dict[int, tuple[int, int]]) -> "Plan":
        """Return the plan with calibrated power-of-two outer scales of K and V, layer -> (k, v)."""
        layers = tuple(
            replace(layer, k_exponent=exponents[i][0], v_exponent=exponents[i][1])
            if layer.kv and i in exponents
            else layer
            for i, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers, digest="")

    def without_guidance(self) -> "Plan":
        """Return the plan that rounds to nearest everywhere (deployment, and the QAT arm)."""
        return replace(self, rules=replace(self.rules, guidance="none"), guided_sites=(), digest="")

    def summary(self) -> dict[str, object]:
        """Return the plan as plain data for the run manifest."""
        return {
            "digest": self.digest,
            "scheme_digest": self.scheme_digest,
            "architecture": self.architecture,
            "rules": asdict(self.rules),
            "num_quantized_modules": self.num_quantized,
            "guided_sites": [f"{site.layer}.{site.kind}" for site in self.guided_sites],
            "kv_exponents": [[layer.k_exponent, layer.v_exponent] for layer in self.layers],
        }


def _digest(plan: Plan) -> str:
    """Digest of what a rollout under this plan computes: the model's class and the precision of every layer.

    How the trainer follows the records (codec, decoder, sites, straight-through options) is not part of it: the
    same rollout may be followed in several ways, and is when they are compared.
    """

    def name(scheme: Scheme | None) -> str:
        return "bf16" if scheme is None else scheme.digest

    layers = [
        [name(s.activation), name(s.weight), name(s.kv), s.k_exponent, s.v_exponent] for s in plan.layers
    ]
    text = json.dumps([plan.architecture, layers])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def plan(model: nn.Module, rules: PlanRules) -> Plan:
    """List every module of `model` with its decision, and derive the precision of each layer.

    Args:
        model: a transformers causal LM of a supported mixture-of-experts architecture.
        rules: the options; `mode="bf16"` makes a plan that quantizes nothing on purpose.

    Raises:
        ConfigError: an unsupported architecture, a quantized dimension that is not a multiple of the block, a
            scheme at a site it cannot serve, an exclude pattern that matches nothing, or rules that ask for
            FP4 and select no module or for guidance and select no site.
    """
    architecture = type(model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"plan: {architecture} is not a supported mixture-of-experts model; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Pass a checkpoint of the Qwen3-MoE family."
        )
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


def _is_experts(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _layer_precision(index: int, decisions: tuple[ModuleDecision, ...], rules: PlanRules) -> LayerPrecision:
    chosen = {d.kind for d in decisions if d.is_quantized and d.layer == index}
    return LayerPrecision(
        activation=_scheme("activation", rules.activation, outer="row") if "experts" in chosen else None,
        weight=_scheme("weight", rules.weight, outer="tensor") if "experts" in chosen else None,
        kv=_scheme("kv", rules.kv, outer="static") if "kv" in chosen else None,
        k_exponent=0,
        v_exponent=0,
    )


def _scheme(option: str, name: str, *, outer: str) -> Scheme:
    """Look a scheme up, and refuse an outer scale that would couple rows or that the site does not have."""
    scheme = scheme_by_name(name)
    if scheme.outer != outer:
        raise ConfigError(
            f"quantization.{option}: {name} has its outer scale per {scheme.outer!r}; {option} needs one per "
            f"{outer!r}. Choose a scheme of that kind, or keep the default."
        )
    return scheme


def _guided(layers: tuple[LayerPrecision, ...], rules: PlanRules) -> tuple[Site, ...]:
    if rules.guidance == "none" or rules.mode == "bf16":
        return ()
    chosen = guided_layers(rules.layers, num_layers=len(layers))
    sites = []
    kinds: tuple[SiteKind, ...] = rules.sites  # type: ignore[assignment]  # checked by PlanRules
    for i in chosen:
        for kind in kinds:
            scheme = layers[i].kv if kind in ("k", "v") else layers[i].activation
            if scheme is not None:
                sites.append(Site(kind=kind, layer=i))
    if not sites:
        raise ConfigError(
            f"plan: guidance {rules.guidance!r} selects no site (sites={list(rules.sites)}, "
            f"layers={rules.layers!r}). "
            'Name at least one quantized site, or say guidance = "none".'
        )
    return tuple(sites)


def _check_dimensions(config: Any, layers: tuple[LayerPrecision, ...]) -> None:
    for layer in layers:
        if layer.activation is not None:
            sizes = {
                "hidden_size": config.hidden_size,
                "moe_intermediate_size": config.moe_intermediate_size,
            }
            check_block(sizes, block=layer.activation.block_size)
        if layer.kv is not None:
            check_block({"head_dim": config.head_dim}, block=layer.kv.block_size)
