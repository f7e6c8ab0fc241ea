"""Model shapes: the modules of a mixture of experts and their sizes, without its weights. Pure Python.

A shape lists the modules of the model under the names that transformers gives them, with their parameter
counts, so that a plan can be made and costed before a single weight is downloaded. It never loads weights and
never decides anything: decisions are `patching.rules`, arithmetic over them is `patching.budget`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of one mixture-of-experts model; every count is per layer unless it says otherwise."""

    name: str
    """Name for people, e.g. `Qwen3-30B-A3B`."""
    hidden: int
    """Width of the residual stream, and of the expert input."""
    layers: int
    """Decoder layers."""
    attention_layers: tuple[int, ...]
    """Layers whose KV cache grows with the context; the others are Gated DeltaNet layers."""
    q_heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of one head."""
    experts: int
    """Routed experts."""
    top_k: int
    """Experts chosen per token."""
    moe_inter: int
    """Inner width of one routed expert."""
    vocab: int
    """Rows of the embedding."""
    shared_inter: int = 0
    """Inner width of the shared expert; 0 means that there is none."""
    has_q_gate: bool = False
    """True when the query projection is doubled by an output gate."""
    qk_norm: int = 0
    """1: one norm of head_dim for q and one for k; 2: norms over the full projections; 0: none."""
    has_attention_bias: bool = False
    """True when q, k, v and o carry a bias."""
    has_expert_bias: bool = False
    """True when router and experts carry a bias (it stays bf16)."""
    has_sinks: bool = False
    """True when attention has one learned sink per query head."""
    router: str = "gate"
    """Name of the router module under `mlp`."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP in place of experts."""
    dense_inter: int = 0
    """Inner width of that MLP."""
    window: int = 0
    """Sliding window of `windowed_layers`, in tokens; 0 means that there is none."""
    windowed_layers: tuple[int, ...] = ()
    """Layers that keep only `window` tokens of K and V."""
    delta_qk_heads: int = 0
    """Gated DeltaNet: query and key heads."""
    delta_v_heads: int = 0
    """Gated DeltaNet: value heads."""
    delta_dim: int = 128
    """Gated DeltaNet: width of one head."""
    delta_conv: int = 4
    """Gated DeltaNet: taps of the causal convolution."""
    is_tied: bool = False
    """True when head and embedding are one matrix."""
    extra_parameters: int = 0
    """Parameters outside the listed modules that also live in memory, in the whole model."""
    note: str = ""
    """What the shape does not know; empty when the count is exact."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers that have routed experts."""
        return tuple(i for i in range(self.layers) if i not in self.dense_layers)

    @property
    def kv_width(self) -> int:
        """Values of K (and as many of V) that one token adds to one attention layer's cache."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleShape:
    """One module and its parameter counts."""

    name: str
    """Whole name as transformers gives it (a loose parameter of a module counts as one line)."""
    num_parameters: int
    """All parameters of the module."""
    num_matrix_parameters: int = field(default=0)
    """Those of them that become FP4 when the module does; biases stay bf16."""


def _attention_modules(shape: ModelShape, prefix: str) -> list[tuple[str, int]]:
    q, kv, h = shape.q_heads * shape.head_dim, shape.kv_width, shape.hidden
    bias = 1 if shape.has_attention_bias else 0
    q_out = q * (2 if shape.has_q_gate else 1)
    found = [
        (f"{prefix}.q_proj", q_out * (h + bias)),
        (f"{prefix}.k_proj", kv * (h + bias)),
        (f"{prefix}.v_proj", kv * (h + bias)),
        (f"{prefix}.o_proj", h * (q + bias)),
    ]
    if shape.qk_norm:
        q_norm, k_norm = (shape.head_dim, shape.head_dim) if shape.qk_norm == 1 else (q, kv)
        found += [(f"{prefix}.q_norm", q_norm), (f"{prefix}.k_norm", k_norm)]
    if shape.has_sinks:
        found.append((f"{prefix}.sinks", shape.q_heads))
    return found


def _delta_modules(shape: ModelShape, prefix: str) -> list[tuple[str, int]]:
    key, value, h = (
        shape.delta_qk_heads * shape.delta_dim,
        shape.delta_v_heads * shape.delta_dim,
        shape.hidden,
    )
    return [
        (f"{prefix}.dt_bias", shape.delta_v_heads),
        (f"{prefix}.A_log", shape.delta_v_heads),
        (f"{prefix}.conv1d", (2 * key + value) * shape.delta_conv),
        (f"{prefix}.norm", shape.delta_dim),
        (f"{prefix}.out_proj", value * h),
        (f"{prefix}.in_proj_qkv", (2 * key + value) * h),
        (f"{prefix}.in_proj_z", value * h),
        (f"{prefix}.in_proj_b", shape.delta_v_heads * h),
        (f"{prefix}.in_proj_a", shape.delta_v_heads * h),
    ]


def _gated_mlp(prefix: str, hidden: int, inter: int) -> list[tuple[str, int]]:
    return [(f"{prefix}.{name}_proj", hidden * inter) for name in ("gate", "up", "down")]


def _moe_modules(shape: ModelShape, prefix: str) -> list[ModuleShape]:
    h, inter, experts = shape.hidden, shape.moe_inter, shape.experts
    matrices = 3 * h * inter * experts
    biases = experts * (2 * inter + h) if shape.has_expert_bias else 0
    found = [
        ModuleShape(
            name=f"{prefix}.{shape.router}",
            num_parameters=experts * (h + (1 if shape.has_expert_bias else 0)),
        ),
        ModuleShape(
            name=f"{prefix}.experts", num_parameters=matrices + biases, num_matrix_parameters=matrices
        ),
    ]
    if shape.shared_inter:
        shared = _gated_mlp(f"{prefix}.shared_expert", h, shape.shared_inter)
        shared.append((f"{prefix}.shared_expert_gate", h))
        found += [ModuleShape(name=name, num_parameters=count) for name, count in shared]
    return found


def modules(shape: ModelShape) -> tuple[ModuleShape, ...]:
    """List the modules that hold parameters, in model order, under transformers' names.

    Returns:
        One entry per module; fused experts are one entry per layer. A tied head has 0 parameters.
    """
    found = [ModuleShape(name="model.embed_tokens", num_parameters=shape.vocab * shape.hidden)]
    for i in range(shape.layers):
        prefix = f"model.layers.{i}"
        if i in shape.attention_layers:
            plain = _attention_modules(shape, f"{prefix}.self_attn")
        else:
            plain = _delta_modules(shape, f"{prefix}.linear_attn")
        found += [ModuleShape(name=name, num_parameters=count) for name, count in plain]
        if i in shape.dense_layers:
            dense = _gated_mlp(f"{prefix}.mlp", shape.hidden, shape.dense_inter)
            found += [ModuleShape(name=name, num_parameters=count) for name, count in dense]
        else:
            found += _moe_modules(shape, f"{prefix}.mlp")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found.append(ModuleShape(name=f"{prefix}.{norm}", num_parameters=shape.hidden))
    found.append(ModuleShape(name="model.norm", num_parameters=shape.hidden))
    head = 0 if shape.is_tied else shape.vocab * shape.hidden
    found.append(ModuleShape(name="lm_head", num_parameters=head))
    return tuple(found)


def num_parameters(shape: ModelShape) -> int:
    """Return all parameters of the model, those outside the listed modules included."""
    return sum(m.num_parameters for m in modules(shape)) + shape.extra_parameters
