"""The decision rule of a plan: from a module's name to FP4 or bf16, with the reason. Pure Python, no torch.

One rule serves real models (`patching.plan`) and models known by name only (`patching.shapes`): by default
routed experts and the KV cache become FP4; router, shared expert, attention projections, embeddings, norms and
head stay bf16. A pattern is a whole-name glob, never a substring, and one that matches nothing is an error.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tracefp4.coding import CODECS, codec_by_name, codec_names
from tracefp4.errors import ConfigError

SITE_KINDS = ("x", "k", "v", "w2")
MODES = ("bf16", "fp4")
AUTO = "auto"
DECODERS = ("bracket", "nearest_cell")
GATES = ("auto", "none", "noise")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """Options of a plan; the `[quantization]` table of a recipe."""

    mode: str = "fp4"
    """`fp4`, or `bf16` for the control that quantizes nothing."""
    guidance: str = "bch64_3+coset1"
    """What is recorded and followed: `none` (nearest rounding), one codec for every site (any name that
    `coding.codec_by_name` knows), or `auto`, a codec per site chosen from measured noise."""
    gate: str = "auto"
    """Where a record is followed: `none`, everywhere (the paper's rule); `noise`, only in a band around the
    rounding boundaries as wide as the measured noise (`guidance.gate`), so that what an update moved is seen to move;
    `auto`, noise wherever something is guided."""
    decoder: str = "nearest_cell"
    """How recorded low bits are decoded: `bracket` (the paper's) or `nearest_cell`."""
    sites: tuple[str, ...] = ("x", "k", "v")
    """Site kinds that are recorded and followed: x (expert input), k, v, w2 (down-projection input)."""
    layers: str = "all"
    """Layers that are recorded and followed: `all`, `last_half`, `last:N`."""
    last_layers_bf16: int = 0
    """How many of the last decoder layers keep bf16 experts and KV."""
    exclude: tuple[str, ...] = ()
    """Whole-name globs of modules that stay bf16, e.g. `model.layers.3.*`."""
    activation: str = "NVFP4_ROW_POW2"
    """Scheme of the expert inputs; `none` keeps them bf16 (weight-only FP4)."""
    weight: str = "NVFP4_TENSOR_POW2"
    """Scheme of the expert weights; `none` keeps them bf16."""
    kv: str = "NVFP4_KV"
    """Scheme of the KV cache; `none` keeps it bf16."""
    replay_routing: bool = True
    """Follow the rollout's expert choice in the trainer (R3)."""
    backward: str = "dequantized"
    """Operands of the backward: `dequantized`, or `high_precision`."""
    ste: str = "identity"
    """Gradient across the activation quantizer: `identity`, or `clip`."""

    @property
    def is_gated(self) -> bool:
        """Whether records are followed in a band only."""
        return self.guidance != "none" and self.gate != "none"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _check_guidance(self.guidance)
        _one_of("gate", self.gate, GATES)
        _one_of("decoder", self.decoder, DECODERS)
        _one_of("backward", self.backward, ("dequantized", "high_precision"))
        _one_of("ste", self.ste, ("identity", "clip"))
        for kind in self.sites:
            _one_of("sites", kind, SITE_KINDS)
        if self.last_layers_bf16 < 0:
            raise ConfigError(
                f"quantization.last_layers_bf16 must be 0 or more; got {self.last_layers_bf16}."
            )
        _layer_count(self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDecision:
    """What happens to one module, and why."""

    name: str
    """Whole module name, e.g. `model.layers.0.mlp.experts`."""
    layer: int | None
    """Decoder layer, or None outside the layers."""
    kind: str
    """`experts`, `kv`, `router`, `attention`, `shared_expert`, `mlp`, `norm`, `embedding`, `head`, `other`."""
    is_quantized: bool
    """True when the module computes in FP4."""
    reason: str
    """One clause a person can act on."""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"quantization.{name}: unknown value {value!r}; allowed: {', '.join(allowed)}.{hint}"
        )


def _check_guidance(name: str) -> None:
    if name in ("none", AUTO):
        return
    try:
        codec_by_name(name)
    except ConfigError:
        near = difflib.get_close_matches(name, ("none", AUTO, *CODECS), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Choose one of them."
        raise ConfigError(
            f"quantization.guidance: unknown value {name!r}; allowed: none, {AUTO}, or a codec, which is "
            f"{codec_names()}. {hint}"
        ) from None


def guided_layers(rule: str, *, num_layers: int) -> tuple[int, ...]:
    """Turn a layer rule into layer indices.

    Args:
        rule: `all`, `last_half` (the deeper half, rounded up), or `last:N`.
        num_layers: decoder layers of the model.

    Raises:
        ConfigError: the rule is none of these, or N is more than the model has.
    """
    count = _layer_count(rule)
    if rule == "last_half":
        count = num_layers - num_layers // 2
    elif rule == "all":
        count = num_layers
    if count > num_layers:
        raise ConfigError(
            f"quantization.layers: {rule!r} asks for more than the model's {num_layers} layers."
        )
    return tuple(range(num_layers - count, num_layers))


def _layer_count(rule: str) -> int:
    """N of `last:N`, 0 for the named rules; refuses anything else."""
    if rule in ("all", "last_half"):
        return 0
    head, _, count = rule.partition(":")
    if head == "last" and count.isdigit() and int(count) > 0:
        return int(count)
    raise ConfigError(
        f"quantization.layers: unknown rule {rule!r}; allowed: all, last_half, last:N with N >= 1."
    )


# Ordered: the first match names the kind. `self_attn` itself stands for its cache; its projections follow.
_KINDS = (
    ("*.mlp.experts", "experts"),
    ("*.mlp.experts.*", "experts"),
    ("*.mlp.gate", "router"),
    ("*.mlp.router", "router"),
    ("*.mlp.shared_expert*", "shared_expert"),
    ("*.kv_cache", "kv"),
    ("*.self_attn.*_norm", "norm"),
    ("*.self_attn.*", "attention"),
    ("*.linear_attn.*", "attention"),
    ("*.mlp.*", "mlp"),
    ("*norm*", "norm"),
    ("*embed*", "embedding"),
    ("lm_head", "head"),
)

_REASONS = {
    "router": "the router stays bf16: a flipped expert costs more than any rounding",
    "shared_expert": "the shared expert stays bf16",
    "attention": "attention projections stay bf16",
    "mlp": "dense MLPs stay bf16",
    "norm": "norms stay bf16",
    "embedding": "embeddings stay bf16",
    "head": "the head stays bf16",
    "other": "not a routed expert and not a KV cache",
}


def module_kind(name: str) -> str:
    """Return the kind of a module from its whole name."""
    return next((kind for pattern, kind in _KINDS if fnmatchcase(name, pattern)), "other")


def decide(names: Iterable[str], *, num_layers: int, rules: PlanRules) -> tuple[ModuleDecision, ...]:
    """Decide every module, and add one `kv_cache` entry per layer that has an attention module.

    Args:
        names: whole module names, in model order (leaf modules, and fused experts as one).
        num_layers: decoder layers.
        rules: the options.

    Raises:
        ConfigError: an exclude pattern matches no module.
    """
    listed = list(names)
    with_cache: list[str] = []
    for name in listed:
        with_cache.append(name)
        if name.endswith(".self_attn.k_proj"):
            with_cache.append(name.replace("k_proj", "kv_cache"))
    for pattern in rules.exclude:
        if not any(fnmatchcase(name, pattern) for name in with_cache):
            near = difflib.get_close_matches(pattern, with_cache, n=1, cutoff=0.3)
            raise ConfigError(
                f"quantization.exclude: {pattern!r} matches no module; patterns are whole-name globs. "
                f"{f'Nearest name: {near[0]}.' if near else f'A name looks like {with_cache[0]}.'}"
            )
    return tuple(_decide_one(name, num_layers, rules) for name in with_cache)


def _decide_one(name: str, num_layers: int, rules: PlanRules) -> ModuleDecision:
    kind = module_kind(name)
    layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
    quantized, reason = False, _REASONS.get(kind, "")
    if kind in ("experts", "kv"):
        quantized, reason = _decide_candidate(name, kind, layer, num_layers, rules)
    return ModuleDecision(name=name, layer=layer, kind=kind, is_quantized=quantized, reason=reason)


def _decide_candidate(
    name: str, kind: str, layer: int | None, num_layers: int, rules: PlanRules
) -> tuple[bool, str]:
    if rules.mode == "bf16":
        return False, 'mode = "bf16"'
    pattern = next((p for p in rules.exclude if fnmatchcase(name, p)), None)
    if pattern is not None:
        return False, f"excluded by {pattern!r}"
    if layer is not None and layer >= num_layers - rules.last_layers_bf16:
        return False, f"among the last {rules.last_layers_bf16} layers (last_layers_bf16)"
    if kind == "kv" and rules.kv == "none":
        return False, 'kv = "none"'
    if kind == "experts" and rules.activation == rules.weight == "none":
        return False, 'activation = weight = "none"'
    scheme = rules.kv if kind == "kv" else f"{rules.activation} x {rules.weight}".replace("none", "bf16")
    return True, f"{'KV cache' if kind == 'kv' else 'routed experts'}: {scheme}"
