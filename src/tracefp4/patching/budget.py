"""What a plan costs: guidance bytes per token, weight and KV memory, and whether it fits a card. Pure Python.

The decisions come from `patching.rules`, the sizes from `patching.shapes`, the bytes of a row from `coding.codec`; this
file only multiplies. A token's record has the rows of every guided site (codes and block scales as the codec keeps
them, each padded to whole bytes); a row scheme adds one exponent byte per row, and routing replay one id per expert
chosen. None of it is measured: activations, workspaces and fragmentation are not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tracefp4.coding import CODECS, codec_by_name, expert_id_bytes
from tracefp4.errors import ConfigError
from tracefp4.patching.rules import AUTO, ModuleDecision, PlanRules, decide, guided_layers
from tracefp4.patching.shapes import ModelShape, modules, num_parameters

BLOCK_SIZE = 16
BF16_BYTES = 2
MX_BLOCK_SIZE = 32
FP4_BYTES = 0.5 + 1 / BLOCK_SIZE
# bf16 weight 2, bf16 gradient 2, fp32 master copy 4, two fp32 Adam moments 8.
TRAINER_BYTES_PER_PARAMETER = 16
USABLE_FRACTION = 0.9
GIB = 1024**3
# H200: what its driver reports. The others are datasheet sizes, H100 and B200 in decimal gigabytes.
CARD_BYTES: Mapping[str, int] = {
    "h200": 139 * GIB,
    "h100": 80 * 10**9,
    "b200": 180 * 10**9,
    "rtx4090": 24 * GIB,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSize:
    """One recorded site: what one token adds to it."""

    kind: str
    """`x`, `k`, `v` or `w2`."""
    layer: int
    """Decoder layer."""
    width: int
    """Values per row; a multiple of the block."""
    rows: int = 1
    """Rows per token: top_k for w2, else 1. Every row is stored in whole bytes."""
    has_row_exponents: bool = False
    """True under a row scheme, which stores an outer exponent for every row."""
    block: int = BLOCK_SIZE
    """Values per block scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceBytes:
    """Bytes per token of one record, by purpose."""

    activations: int
    """Codec bytes (codes and block scales) of the sites x and w2."""
    kv: int
    """Codec bytes of the sites k and v."""
    row_exponents: int
    """One byte per row of a row scheme."""
    routed_ids: int
    """One id per token, layer and chosen expert, of `coding.expert_id_bytes`."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.kv + self.row_exponents + self.routed_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one model on one device, in bf16 and under the plan."""

    parameters: int
    """Parameters of the whole model."""
    weights_bf16: int
    """All weights in bf16."""
    weights_plan: int
    """Weights of the engine: quantized experts in FP4, the rest in bf16."""
    kv_bf16: int
    """KV cache of the whole batch at the asked context, in bf16."""
    kv_plan: int
    """The same under the plan."""
    state: int
    """Recurrent state of DeltaNet layers (fp32) for the whole batch; 0 for pure attention models."""
    trainer: int
    """bf16 weights and gradients, fp32 master weights and Adam moments."""


def block_of(scheme: str) -> int:
    """Return the values per block scale of a scheme, from its name: 32 for MXFP4, 16 for NVFP4."""
    return MX_BLOCK_SIZE if scheme.startswith("MXFP4") else BLOCK_SIZE


def fp4_bytes(scheme: str) -> float:
    """Return the bytes per value of a scheme: half a byte for the code and a share of the block scale; 2 for `none`."""
    return BF16_BYTES if scheme == "none" else 0.5 + 1 / block_of(scheme)


def check_block(sizes: Mapping[str, int], *, block: int = BLOCK_SIZE, module: str = "FP4") -> None:
    """Refuse sizes that are not a multiple of the block.

    Args:
        sizes: Width by name.
        block: Values per block scale.
        module: What would be quantized, for the message.

    Raises:
        ConfigError: names the module, the size, its value and the multiple.
    """
    for name, size in sizes.items():
        if size % block:
            raise ConfigError(
                f"plan: {module} needs {name} divisible by {block}; got {size}. Use a model with {name} a "
                f"multiple of {block}, a scheme of smaller blocks, or exclude the modules in the plan."
            )


def codec_bytes(width: int, codec: str, *, block: int = BLOCK_SIZE) -> int:
    """Return the bytes that a codec keeps of one row of `width` values: codes and block scales.

    Raises:
        ConfigError: an unknown codec, or a width that is not a multiple of the block.
    """
    kept = codec_by_name(codec)
    check_block({"the width of a site": width}, block=block)
    return kept.row_bytes(width, block_size=block)


def guidance_bytes(
    sites: Iterable[SiteSize], *, codec: str, num_routed_ids: int, num_experts: int
) -> GuidanceBytes:
    """Add up what one token of a record weighs.

    Args:
        sites: the guided sites.
        codec: name of a codec, the same at every site.
        num_routed_ids: expert ids per token over all layers; 0 when routing is not replayed.
        num_experts: routed experts, which sets the bytes of one id.
    """
    activations = kv = exponents = 0
    for site in sites:
        stored = site.rows * codec_bytes(site.width, codec, block=site.block)
        if site.kind in ("k", "v"):
            kv += stored
        else:
            activations += stored
        exponents += site.rows * site.has_row_exponents
    return GuidanceBytes(
        activations=activations,
        kv=kv,
        row_exponents=exponents,
        routed_ids=num_routed_ids * expert_id_bytes(num_experts),
    )


def decisions_for(shape: ModelShape, rules: PlanRules) -> tuple[ModuleDecision, ...]:
    """Apply the decision rule to a shape.

    Raises:
        ConfigError: FP4 was asked for and nothing was selected, a size does not divide by the block, or an
            exclude pattern matches nothing.
    """
    names = [m.name for m in modules(shape)]
    decisions = decide(names, num_layers=shape.layers, rules=rules)
    if rules.mode == "bf16":
        return decisions
    chosen = {d.kind for d in decisions if d.is_quantized}
    if not chosen:
        raise ConfigError(
            f"plan: FP4 was asked for and no module of {shape.name} was selected "
            f"(exclude={list(rules.exclude)}, "
            f"last_layers_bf16={rules.last_layers_bf16} of {shape.layers} layers). "
            'Relax the rules, or say mode = "bf16".'
        )
    if "experts" in chosen:
        sizes = {"hidden_size": shape.hidden, "moe_intermediate_size": shape.moe_inter}
        check_block(sizes, block=max(block_of(rules.activation), block_of(rules.weight)))
    if "kv" in chosen:
        check_block({"head_dim": shape.head_dim})
    return decisions


def guided_kinds(decision: ModuleDecision, *, num_layers: int, rules: PlanRules) -> tuple[str, ...]:
    """Return the site kinds of one module that are recorded; empty for bf16 and unguided layers."""
    if rules.guidance == "none" or rules.mode == "bf16" or not decision.is_quantized:
        return ()
    if decision.layer not in guided_layers(rules.layers, num_layers=num_layers):
        return ()
    if decision.kind == "experts" and rules.activation == "none":
        return ()
    owned = ("k", "v") if decision.kind == "kv" else ("x", "w2")
    return tuple(kind for kind in rules.sites if kind in owned)


def guided_sites(
    shape: ModelShape, decisions: Iterable[ModuleDecision], rules: PlanRules
) -> tuple[SiteSize, ...]:
    """List the sites that are recorded: quantized, in a guided layer, and of a named kind.

    Raises:
        ConfigError: guidance was asked for and no site is left.
    """
    if rules.guidance == "none" or rules.mode == "bf16":
        return ()
    block, by_row = block_of(rules.activation), "_ROW_" in rules.activation
    sizes = {
        "x": SiteSize(kind="x", layer=0, width=shape.hidden, has_row_exponents=by_row, block=block),
        "k": SiteSize(kind="k", layer=0, width=shape.kv_width),
        "v": SiteSize(kind="v", layer=0, width=shape.kv_width),
        "w2": SiteSize(
            kind="w2", layer=0, width=shape.moe_inter, rows=shape.top_k, has_row_exponents=by_row, block=block
        ),
    }
    found = []
    for decision in decisions:
        for kind in guided_kinds(decision, num_layers=shape.layers, rules=rules):
            assert decision.layer is not None
            found.append(replace(sizes[kind], layer=decision.layer))
    if not found:
        raise ConfigError(
            f"plan: guidance {rules.guidance!r} selects no site of {shape.name} (sites={list(rules.sites)}, "
            f'layers={rules.layers!r}). Name a quantized site, or say guidance = "none".'
        )
    return tuple(found)


def record_bytes(shape: ModelShape, decisions: Iterable[ModuleDecision], rules: PlanRules) -> GuidanceBytes:
    """Return the bytes per token of the records that a plan makes: routed ids alone without guidance.

    Raises:
        ConfigError: guidance is `auto`, whose codecs no plan knows before a calibration, or selects no site.
    """
    if rules.guidance == AUTO and rules.mode != "bf16":
        raise ConfigError(
            f"plan: records have no size yet; got guidance {AUTO!r}, which chooses a codec per site from measured "
            f"noise. A size needs a codec: {', '.join(CODECS)}. Name one, or compare them with bytes_by_codec."
        )
    sites = guided_sites(shape, decisions, rules)
    ids = len(shape.moe_layers) * shape.top_k if rules.replay_routing else 0
    return guidance_bytes(sites, codec=rules.guidance, num_routed_ids=ids, num_experts=shape.experts)


def bytes_by_codec(
    shape: ModelShape, decisions: Sequence[ModuleDecision], rules: PlanRules
) -> dict[str, GuidanceBytes]:
    """Return what the same sites weigh under every codec of `coding.CODECS`, and under the rules' own; empty without
    guidance."""
    if rules.guidance == "none" or rules.mode == "bf16":
        return {}
    names = CODECS if rules.guidance in (AUTO, *CODECS) else (*CODECS, rules.guidance)
    return {name: record_bytes(shape, decisions, replace(rules, guidance=name)) for name in names}


def _kv_bytes(shape: ModelShape, quantized: set[int], context: int) -> tuple[int, int]:
    bf16 = plan = 0.0
    for i in shape.attention_layers:
        tokens = min(context, shape.window) if shape.window and i in shape.windowed_layers else context
        values = 2 * shape.kv_width * tokens
        bf16 += values * BF16_BYTES
        plan += values * (FP4_BYTES if i in quantized else BF16_BYTES)
    return int(bf16), int(plan)


def _state_bytes(shape: ModelShape) -> int:
    layers = shape.layers - len(shape.attention_layers)
    matrices = shape.delta_v_heads * shape.delta_dim**2 * 4
    taps = (
        (2 * shape.delta_qk_heads + shape.delta_v_heads)
        * shape.delta_dim
        * (shape.delta_conv - 1)
        * BF16_BYTES
    )
    return layers * (matrices + taps)


def memory(
    shape: ModelShape,
    decisions: Iterable[ModuleDecision],
    *,
    context: int,
    batch: int,
    weight: str = "NVFP4_TENSOR_POW2",
) -> Memory:
    """Return what weights, KV cache and optimizer need.

    Args:
        shape: the model.
        decisions: from `decisions_for`.
        context: tokens per sequence, at least 1.
        batch: sequences at once, at least 1.
        weight: name of the scheme of the expert weights; the cache is NVFP4.

    Raises:
        ConfigError: context or batch below 1.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ConfigError(f"plan: {name} must be at least 1; got {value}.")
    experts = {d.name for d in decisions if d.is_quantized and d.kind == "experts"}
    caches = {d.layer for d in decisions if d.is_quantized and d.kind == "kv" and d.layer is not None}
    total = num_parameters(shape)
    quantized = sum(m.num_matrix_parameters for m in modules(shape) if m.name in experts)
    kv_bf16, kv_plan = _kv_bytes(shape, caches, context)
    return Memory(
        parameters=total,
        weights_bf16=total * BF16_BYTES,
        weights_plan=int((total - quantized) * BF16_BYTES + quantized * fp4_bytes(weight)),
        kv_bf16=kv_bf16 * batch,
        kv_plan=kv_plan * batch,
        state=_state_bytes(shape) * batch,
        trainer=total * TRAINER_BYTES_PER_PARAMETER,
    )


def needs(memory: Memory) -> dict[str, int]:
    """Return the bytes that each role needs on one card, by a name for people."""
    return {
        "engine, BF16": memory.weights_bf16 + memory.kv_bf16 + memory.state,
        "engine, FP4 plan": memory.weights_plan + memory.kv_plan + memory.state,
        "trainer, all on one card": memory.trainer,
    }


def card_bytes(card: str) -> int:
    """Return the memory of a card: a known name, or `NGB` for N gibibytes.

    Raises:
        ConfigError: neither.
    """
    name = card.lower()
    if name in CARD_BYTES:
        return CARD_BYTES[name]
    number = name.removesuffix("gb")
    if number != name and number.replace(".", "", 1).isdigit() and float(number) > 0:
        return int(float(number) * GIB)
    raise ConfigError(f"plan: unknown card {card!r}; known: {', '.join(CARD_BYTES)}, or a size such as 48GB.")
