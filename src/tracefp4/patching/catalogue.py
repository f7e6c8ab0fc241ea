"""Shapes known by name, and shapes read from a Hugging Face config.json. Pure Python.

The table holds public sizes only; nothing is downloaded. A config of an architecture that is not listed is
refused with the list.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.patching.shapes import ModelShape


def _every_fourth(layers: int) -> tuple[int, ...]:
    return tuple(range(3, layers, 4))


def _hybrid(name: str, hidden: int, layers: int, **sizes: Any) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        attention_layers=_every_fourth(layers),
        head_dim=256,
        vocab=248320,
        has_q_gate=True,
        qk_norm=1,
        delta_qk_heads=16,
        **sizes,
    )


def _qwen3(name: str, hidden: int, layers: int, **sizes: Any) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        attention_layers=tuple(range(layers)),
        head_dim=128,
        vocab=151936,
        experts=128,
        top_k=8,
        kv_heads=4,
        qk_norm=1,
        **sizes,
    )


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=2880,
        layers=layers,
        attention_layers=tuple(range(layers)),
        q_heads=64,
        kv_heads=8,
        head_dim=64,
        experts=experts,
        top_k=4,
        moe_inter=2880,
        vocab=201088,
        has_attention_bias=True,
        has_expert_bias=True,
        has_sinks=True,
        router="router",
        window=128,
        windowed_layers=tuple(range(0, layers, 2)),
    )


# Public shapes. The value heads of Qwen3.5-122B's DeltaNet layers follow from its published total.
KNOWN_SHAPES: Mapping[str, ModelShape] = {
    "qwen3.5-35b-a3b": _hybrid(
        "Qwen3.5-35B-A3B",
        2048,
        40,
        q_heads=16,
        kv_heads=2,
        experts=256,
        top_k=8,
        moe_inter=512,
        shared_inter=512,
        delta_v_heads=32,
        note="the multi-token-prediction layer and the vision tower are not counted",
    ),
    "qwen3.5-122b-a10b": _hybrid(
        "Qwen3.5-122B-A10B",
        3072,
        48,
        q_heads=32,
        kv_heads=2,
        experts=256,
        top_k=8,
        moe_inter=1024,
        shared_inter=1024,
        delta_v_heads=64,
        note="the multi-token-prediction layer and the vision tower are not counted",
    ),
    "qwen3.8-flash-next": _hybrid(
        "Qwen3.8-Flash-Next",
        2560,
        48,
        q_heads=24,
        kv_heads=2,
        experts=512,
        top_k=10,
        moe_inter=640,
        shared_inter=640,
        delta_v_heads=48,
        extra_parameters=51_000_000_000,
        note="the 51B n-gram table is counted, in bf16; the indexer and the hyper-connections are not",
    ),
    "qwen3.8-2.4t-a95b": _hybrid(
        "Qwen3.8-2.4T-A95B",
        8192,
        92,
        q_heads=64,
        kv_heads=4,
        experts=512,
        top_k=10,
        moe_inter=2048,
        shared_inter=2048,
        delta_v_heads=128,
        note="the inner width of the one shared expert is taken as a routed expert's",
    ),
    "qwen3-30b-a3b": _qwen3("Qwen3-30B-A3B", 2048, 48, q_heads=32, moe_inter=768),
    "qwen3-235b-a22b": _qwen3("Qwen3-235B-A22B", 4096, 94, q_heads=64, moe_inter=1536),
    "gpt-oss-20b": _gpt_oss("gpt-oss-20b", 24, 32),
    "gpt-oss-120b": _gpt_oss("gpt-oss-120b", 36, 128),
    "olmoe-1b-7b": ModelShape(
        name="OLMoE-1B-7B",
        hidden=2048,
        layers=16,
        attention_layers=tuple(range(16)),
        q_heads=16,
        kv_heads=16,
        head_dim=128,
        experts=64,
        top_k=8,
        moe_inter=1024,
        vocab=50304,
        qk_norm=2,
    ),
}

# Shorter names of the same shapes, as people say them.
ALIASES: Mapping[str, str] = {
    "olmoe": "olmoe-1b-7b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "qwen3.5-35b": "qwen3.5-35b-a3b",
    "qwen3.5-122b": "qwen3.5-122b-a10b",
}


def shape_by_name(model: str) -> ModelShape:
    """Return the shape of a model known by name, or read it from a local config.

    Args:
        model: a key of `KNOWN_SHAPES` or `ALIASES` in any case, a `config.json`, or a directory that holds one.

    Raises:
        ConfigError: neither a known name nor a readable config, or a config of another architecture.
    """
    asked = model.lower().rsplit("/", 1)[-1]
    known = KNOWN_SHAPES.get(ALIASES.get(asked, asked))
    if known is not None and not Path(model).exists():
        return known
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        near = difflib.get_close_matches(model.lower(), KNOWN_SHAPES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"plan: {model!r} is neither a known model nor a config.json or a directory with one; "
            f"known: {', '.join(KNOWN_SHAPES)}.{hint}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plan: {path} is not readable JSON ({error}). Pass a Hugging Face config.json."
        ) from error
    return shape_from_config(config, name=path.parent.name or model)


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Read a shape from a Hugging Face config (its `text_config`, where there is one).

    Raises:
        ConfigError: an unsupported `model_type`, or a size that the config does not state.
    """
    text = config.get("text_config", config)
    kind = str(text.get("model_type", config.get("model_type", "")))
    reader = _READERS.get(kind)
    if reader is None:
        raise ConfigError(
            f"plan: model_type {kind!r} of {name} is not a supported mixture of experts; "
            f"supported: {', '.join(_READERS)}. Name a known model or pass another config."
        )
    try:
        return reader(text, name)
    except KeyError as error:
        raise ConfigError(f"plan: the config of {name} lacks {error}, which a {kind} model needs.") from error


def _shared_sizes(c: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "name": name,
        "hidden": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "q_heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "experts": c["num_experts"] if "num_experts" in c else c["num_local_experts"],
        "top_k": c["num_experts_per_tok"],
        "vocab": c["vocab_size"],
        "has_attention_bias": bool(c.get("attention_bias", False)),
        "is_tied": bool(c.get("tie_word_embeddings", False)),
        "attention_layers": tuple(range(c["num_hidden_layers"])),
    }


def _read_qwen3_moe(c: Mapping[str, Any], name: str) -> ModelShape:
    every, only = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or ()
    dense = tuple(i for i in range(c["num_hidden_layers"]) if i in only or (i + 1) % every)
    sizes = _shared_sizes(c, name) | {
        "moe_inter": c["moe_intermediate_size"],
        "qk_norm": 1,
        "dense_layers": dense,
    }
    return ModelShape(**sizes, dense_inter=c["intermediate_size"] if dense else 0)


def _read_qwen3_5_moe(c: Mapping[str, Any], name: str) -> ModelShape:
    kinds = c.get("layer_types")
    full = _every_fourth(c["num_hidden_layers"])
    if kinds:
        full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return ModelShape(
        **_shared_sizes(c, name)
        | {"attention_layers": full, "moe_inter": c["moe_intermediate_size"], "qk_norm": 1},
        shared_inter=c["shared_expert_intermediate_size"],
        has_q_gate=True,
        delta_qk_heads=c["linear_num_key_heads"],
        delta_v_heads=c["linear_num_value_heads"],
        delta_dim=c["linear_value_head_dim"],
        delta_conv=c.get("linear_conv_kernel_dim", 4),
        note="the multi-token-prediction layer and the vision tower are not counted",
    )


def _read_gpt_oss(c: Mapping[str, Any], name: str) -> ModelShape:
    sizes = _shared_sizes(c, name) | {"has_attention_bias": bool(c.get("attention_bias", True))}
    kinds = c.get("layer_types") or ["sliding_attention", "full_attention"] * c["num_hidden_layers"]
    windowed = tuple(i for i in range(c["num_hidden_layers"]) if kinds[i] == "sliding_attention")
    return ModelShape(
        **sizes,
        moe_inter=c["intermediate_size"],
        has_expert_bias=True,
        has_sinks=True,
        router="router",
        window=c.get("sliding_window") or 0,
        windowed_layers=windowed,
    )


def _read_olmoe(c: Mapping[str, Any], name: str) -> ModelShape:
    return ModelShape(**_shared_sizes(c, name), moe_inter=c["intermediate_size"], qk_norm=2)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], ModelShape]] = {
    "qwen3_moe": _read_qwen3_moe,
    "qwen3_5_moe": _read_qwen3_5_moe,
    "qwen3_5_moe_text": _read_qwen3_5_moe,
    "gpt_oss": _read_gpt_oss,
    "olmoe": _read_olmoe,
}
