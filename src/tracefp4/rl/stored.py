"""A policy whose weights are the bytes of an FP4 checkpoint, and the plan that evaluates exactly what it stores.

The engine decodes the bytes as they are. K and V are rounded as the run that trained the weights rounded them, where
the checkpoint says how; else they are calibrated on an ordinary model of the decoded values, patched like any other.
Nothing is quantized a second time. Such a checkpoint is evaluated and sampled from, never trained: its values have lost
what training would move.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.checkpoints import Fp4Model, load_fp4
from tracefp4.errors import ConfigError
from tracefp4.formats import BlockTensor
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.guidance import Site
from tracefp4.ops.dequantize import dequantize
from tracefp4.patching import Plan, PlanRules, plan
from tracefp4.patching.rules import ModuleDecision, decide
from tracefp4.rl.planning import calibrated_plan
from tracefp4.rl.policy import Policy, checked_directory, load_tokenizer, policy_of

_PLAIN_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPolicy:
    """An FP4 checkpoint as a policy."""

    policy: Policy
    """Model of the decoded values, tokenizer, defaults; float32 in host memory, for plans and calibration alone."""
    stored: Fp4Model
    """Schemes, exponents, and where they hold."""
    state: Mapping[str, Tensor | BlockTensor]
    """What an engine loads: bytes where quantized, else tensors; names as in memory, experts fused."""

    @property
    def config(self) -> Any:
        """The model's config; with `state_dict` it makes this an argument of `sync.build_engine`."""
        return self.policy.model.config

    def state_dict(self) -> Mapping[str, Tensor | BlockTensor]:
        """Return `state`."""
        return self.state

    @property
    def is_exact_in_bf16(self) -> bool:
        """Whether bf16 storage holds what weights and inputs are rounded to."""
        schemes = [given.scheme for given in self.state.values() if isinstance(given, BlockTensor)]
        schemes += [] if self.stored.activation is None else [self.stored.activation]
        return all(scheme.is_exact_in_bf16 for scheme in schemes)

    def on(self, device: torch.device) -> "StoredPolicy":
        """Return it with `state` on a device."""
        return replace(self, state={name: _moved(given, device) for name, given in self.state.items()})


def is_fp4_checkpoint(path: str | Path) -> bool:
    """Return whether a directory's config names a quantization; False where there is no readable config."""
    directory = Path(path)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("quantization_config")) or (directory / "hf_quant_config.json").is_file()


def load_stored(path: str | Path) -> StoredPolicy:
    """Load an FP4 checkpoint of a supported family.

    Raises:
        ConfigError: not such a checkpoint; a layer of which only some expert matrices are FP4; static inputs of other
            modules than routed experts, which the engine does not round.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = checked_directory(path)
    stored = load_fp4(directory)
    _check(directory, stored)
    state = _fused(stored.state)
    config = dict(stored.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    values = {name: dequantize(t) if isinstance(t, BlockTensor) else t.float() for name, t in state.items()}
    problems = model.load_state_dict(values, strict=False)
    missing = sorted(
        set(problems.missing_keys) - ({"lm_head.weight"} if config.get("tie_word_embeddings") else set())
    )
    if missing or problems.unexpected_keys:
        raise ConfigError(
            f"model.path: {directory} does not hold the weights of its model; missing {missing[:3]}, unexpected "
            f"{sorted(problems.unexpected_keys)[:3]}. Export or download the checkpoint again."
        )
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    policy = policy_of(model, load_tokenizer(directory), path=directory)
    return StoredPolicy(policy=policy, stored=stored, state=state)


def stored_rules(found: StoredPolicy, rules: PlanRules) -> PlanRules:
    """Return these rules with the KV cache as the checkpoint says; as they are where it says nothing."""
    cache = found.stored.cache
    if cache is None:
        return rules
    if cache.scheme is None:
        return replace(rules, kv="none")
    everywhere = replace(rules, kv=cache.scheme.name, exclude=(), last_layers_bf16=0)
    kept = tuple(each.name for each in _caches(found, everywhere) if each.layer not in cache.exponents)
    return replace(everywhere, exclude=kept)


def stored_plan(found: StoredPolicy, rules: PlanRules, *, prompts: Sequence[Sequence[int]]) -> Plan:
    """Return the plan that rounds what the checkpoint says, and the cache as the rules say.

    Args:
        found: the checkpoint.
        rules: only what they say of the KV cache is used (`kv`, `exclude`, `last_layers_bf16`); weights and
            activations are the checkpoint's.
        prompts: token ids to calibrate K and V on, where the checkpoint does not say how they are rounded.

    Raises:
        ConfigError: mode bf16; or rules that round K and V, and not as the run did that the checkpoint is from.
    """
    model, stored = found.policy.model, found.stored
    if rules.mode == "bf16":
        raise ConfigError(
            f"{found.policy.path} is an FP4 checkpoint and has no bf16 weights; got mode bf16. Only fp4 is allowed "
            "for it. Evaluate the checkpoint that it was made from."
        )
    caches = _caches(found, rules)
    kept = [each.name for each in caches if not each.is_quantized]
    kept += [name for name in _experts(found.state) if not _is_fp4(found.state, name)]
    own = PlanRules(
        guidance="none",
        weight=stored.weight.name,
        activation="none" if stored.activation is None else stored.activation.name,
        kv=rules.kv,
        exclude=tuple(kept),
    )
    exponents = {Site("x", layer): x for layer, (x, _) in stored.exponents.items()}
    exponents |= {Site("w2", layer): w2 for layer, (_, w2) in stored.exponents.items()}
    rounded = {each.layer for each in caches if each.is_quantized and each.layer is not None}
    if rounded and stored.cache is not None:
        _check_cache(found, rules, rounded)
        exponents |= {Site("k", layer): k for layer, (k, _) in stored.cache.exponents.items()}
        exponents |= {Site("v", layer): v for layer, (_, v) in stored.cache.exponents.items()}
    elif rounded:
        # the decoded values are not quantized again while K and V are calibrated on them
        decoded = replace(own, weight="none")
        found_there = calibrated_plan(found.policy, decoded, prompts=prompts, arithmetic=EMULATED)
        exponents = found_there.static_exponents | exponents
    return plan(model, own).with_exponents(exponents)


def _moved(given: Tensor | BlockTensor, device: torch.device) -> Tensor | BlockTensor:
    if isinstance(given, Tensor):
        return given.to(device)
    return replace(
        given,
        packed=given.packed.to(device),
        block_scales=given.block_scales.to(device),
        outer=given.outer.to(device),
    )


def _caches(found: StoredPolicy, rules: PlanRules) -> list[ModuleDecision]:
    """What rules decide of every KV cache."""
    model = found.policy.model
    names = [name for name, _ in model.named_modules()]
    decisions = decide(names, num_layers=model.config.num_hidden_layers, rules=rules)
    return [each for each in decisions if each.kind == "kv"]


def _check_cache(found: StoredPolicy, rules: PlanRules, rounded: set[int]) -> None:
    """Refuse rules that round K and V otherwise than the run did."""
    cache = found.stored.cache
    assert cache is not None
    scheme = "none" if cache.scheme is None else cache.scheme.name
    if (rules.kv, rounded) != (scheme, set(cache.exponents)):
        raise ConfigError(
            f"{found.policy.path} is from a run with kv = {scheme!r} in layers {sorted(cache.exponents)}; these rules "
            f"have {rules.kv!r} in layers {sorted(rounded)}. Log-probs would not be the run's. Use its "
            'quantization rules (kv, exclude, last_layers_bf16), or kv = "none" to keep K and V in bf16.'
        )


def _fused(state: Mapping[str, Tensor | BlockTensor]) -> dict[str, Tensor | BlockTensor]:
    """Stack experts that stay in high precision, which are stored one by one, as transformers has them in memory."""
    found = {name: tensor for name, tensor in state.items() if not _PLAIN_EXPERT.fullmatch(name)}
    layers: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name in state.keys() - found.keys():
        match, tensor = _PLAIN_EXPERT.fullmatch(name), state[name]
        assert match is not None and isinstance(tensor, Tensor)
        layers[match[1]][int(match[2])][match[3]] = tensor
    for name, experts in layers.items():
        parts = [experts[i] for i in sorted(experts)]
        found[f"{name}.down_proj"] = torch.stack([part["down"] for part in parts])
        found[f"{name}.gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in parts])
    return found


def _experts(state: Mapping[str, Tensor | BlockTensor]) -> list[str]:
    """Names of the experts modules."""
    return [name.removesuffix(".gate_up_proj") for name in state if name.endswith(".experts.gate_up_proj")]


def _is_fp4(state: Mapping[str, Tensor | BlockTensor], experts: str) -> bool:
    return isinstance(state[f"{experts}.gate_up_proj"], BlockTensor)


def _check(directory: Path, stored: Fp4Model) -> None:
    """Refuse what the engine would compute otherwise than the checkpoint says."""
    kinds: dict[str, set[bool]] = defaultdict(set)
    for name, given in stored.state.items():
        module, found, _ = name.partition(".mlp.experts.")
        if found:
            kinds[module].add(isinstance(given, BlockTensor))
    mixed = next((module for module, found in kinds.items() if len(found) == 2), None)
    if mixed is not None:
        raise ConfigError(
            f"{directory}: the experts of {mixed} are FP4 in part. All matrices of a layer's experts are FP4, or none. "
            "Quantize again without patterns inside the experts."
        )
    others = sorted(name for name in stored.quantized if ".experts." not in name)
    if others and stored.activation is not None:
        raise ConfigError(
            f"{directory}: inputs of {others[0]} and {len(others) - 1} others are rounded under "
            f"{stored.activation.name}. The engine rounds the inputs of routed experts only. Quantize again with "
            "--activations w4a16, or without these modules."
        )
