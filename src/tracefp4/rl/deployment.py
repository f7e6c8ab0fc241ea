"""A checkpoint as it would be deployed: BF16, or FP4 rounded to nearest, with its own sampling defaults.

There is no guidance here and nothing is recorded. A checkpoint that a run wrote names the run's rules (which
layers are FP4, under which schemes) and its static exponents, and is rounded as they say. An FP4 checkpoint holds the
bytes of its weights and says how inputs are rounded, and K and V where a run trained it; the engine computes with
exactly these. Any other one follows the default rules and is calibrated, on prompts of the task or on a fixed text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED
from tracefp4.patching import Plan, PlanRules, apply
from tracefp4.rl import checkpoint
from tracefp4.rl.config import ModelConfig, RolloutConfig, RunConfig
from tracefp4.rl.evaluation import Evaluation, evaluate_task
from tracefp4.rl.opening import CALIBRATION_PROMPTS
from tracefp4.rl.placement import Placement, placement_of
from tracefp4.rl.planning import calibrated_plan, remembered_plan, rules_of
from tracefp4.rl.policy import Policy, load_policy
from tracefp4.rl.prompts import build_held_out, build_source, encode
from tracefp4.rl.stored import StoredPolicy, is_fp4_checkpoint, load_stored, stored_plan, stored_rules
from tracefp4.rl.sync import EngineOptions, build_engine, reader
from tracefp4.rl.tasks import Task, encode_prompt
from tracefp4.rl.update import EVALUATION_SEED
from tracefp4.rollout import SamplingParams

# calibrates K and V where no task is at hand; the exponents are powers of two, so any ordinary text will do
CALIBRATION_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it rests for a while under an old tree.",
    "Q: What is 17 + 25 - 8? A: 17 + 25 = 42, and 42 - 8 = 34. The answer is 34.",
    "def area(width, height):\n    return width * height\n",
)
MAX_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """A loaded checkpoint and how it is rounded."""

    policy: Policy
    """Model (patched, parameters in bf16 values), tokenizer and defaults."""
    plan: Plan
    """What is FP4; guides nothing."""
    params: SamplingParams
    """The checkpoint's own sampling defaults."""
    weights: Any
    """What an engine is built on: the model, or the stored bytes of an FP4 checkpoint."""
    cache: str
    """One line on K and V: their schemes, and whether exponents are the run's or calibrated here."""
    placement: Placement
    """Where the engine computes, and in which arithmetic."""


def load_deployed(path: str | Path, *, mode: str = "fp4", device: str = "auto") -> Deployed:
    """Load a checkpoint for generation.

    Args:
        path: a local Hugging Face checkpoint of a supported family. One that a run wrote is quantized by the
            run's own rules; an FP4 checkpoint is taken as it is stored.
        mode: `fp4` (rounded to nearest) or `bf16`.
        device: as `model.device` of a recipe.

    Raises:
        ConfigError: a checkpoint that cannot be used, or an unknown mode.
    """
    default = PlanRules(mode=mode, guidance="none")
    source, placement = _load(ModelConfig(path=str(path), device=device))
    policy = source if isinstance(source, Policy) else source.policy
    summary = _summary(policy)
    rules = default if not summary else replace(rules_of(summary), mode=mode, guidance="none")
    if isinstance(source, StoredPolicy):
        rules = stored_rules(source, default)
    texts = [policy.tokenizer.encode(text) for text in CALIBRATION_TEXTS]
    return _deployed(source, rules, placement, calibration=texts)


def evaluate_checkpoint(
    config: RunConfig, *, num_items: int, samples: int = 1, tell: Callable[[str], None] | None = None
) -> Evaluation:
    """Evaluate `model.path` of a recipe on held-out items of its task.

    Args:
        config: model, task, engine sizes and what is quantized; guidance is ignored. For a checkpoint of an FP4
            run, the recipe must quantize what the run quantized, or nothing. Of an FP4 checkpoint, weights and inputs
            are rounded as it says, and only what the recipe says of the KV cache is used: one that a run exported
            must be given the run's rules of the cache, or none.
        num_items: held-out items.
        samples: 1 samples at `run.eval_temperature` (0, greedy, unless the recipe says otherwise); more draw
            with temperature, top-p and top-k of the recipe or of the checkpoint, and give pass@k.
        tell: told `Deployed.cache` before the items are sampled.

    Raises:
        ConfigError: a checkpoint, task or size that cannot be used; rules that are not those of the run which
            wrote the checkpoint.
    """
    source = build_held_out(config.task)  # the items that a run of this recipe evaluates on
    loaded, placement = _load(config.model)
    policy = loaded if isinstance(loaded, Policy) else loaded.policy
    training = build_source(config.task)
    prompts = [encode(training.item(i), tokenizer=policy.tokenizer) for i in range(CALIBRATION_PROMPTS)]
    deployed = _deployed(
        loaded, replace(config.quantization, guidance="none"), placement, calibration=prompts
    )
    if tell is not None:
        tell(deployed.cache)
    engine = build_engine(
        deployed.weights,
        deployed.plan,
        arithmetic=placement.arithmetic,
        rollout=config.rollout,
        records=False,
        options=EngineOptions(decode=reader(policy.tokenizer)),
    )
    return evaluate_task(
        config.task,
        engine,
        tokenizer=policy.tokenizer,
        source=source,
        params=_evaluation_params(config, deployed.params, samples=samples),
        num_items=num_items,
    )


def generate_text(
    deployed: Deployed, prompts: Sequence[str], *, params: SamplingParams, is_chat: bool = False
) -> list[list[str]]:
    """Complete prompts.

    Args:
        deployed: from `load_deployed`.
        prompts: plain texts, none empty.
        params: sampling; start from `deployed.params`.
        is_chat: put each prompt into the tokenizer's chat template as a user's turn.

    Returns:
        [len(prompts)][params.n] texts without special tokens.

    Raises:
        ConfigError: an empty prompt, or a chat prompt for a tokenizer without a template.
    """
    tokenizer = deployed.policy.tokenizer
    ids = [
        encode_prompt(
            Task(source="prompt", index=i, prompt=text), tokenizer=tokenizer, uses_chat_template=is_chat
        )
        for i, text in enumerate(prompts)
    ]
    engine = build_engine(
        deployed.weights,
        deployed.plan,
        arithmetic=deployed.placement.arithmetic,
        rollout=_sizes(ids, params),
        records=False,
    )
    return [
        [tokenizer.decode(found.token_ids, skip_special_tokens=True) for found in group]
        for group in engine.generate(ids, params)
    ]


def _load(config: ModelConfig) -> tuple[Policy | StoredPolicy, Placement]:
    """The checkpoint where it is to compute. `auto` is emulated for stored bytes that bf16 storage cannot hold."""
    placement = placement_of(config)
    if not is_fp4_checkpoint(config.path):
        return load_policy(config.path, placement=placement), placement
    found = load_stored(config.path)
    if config.arithmetic == "auto" and not found.is_exact_in_bf16:
        placement = replace(placement, arithmetic=EMULATED)
    return found.on(placement.device), placement


def _deployed(
    source: Policy | StoredPolicy,
    rules: PlanRules,
    placement: Placement,
    *,
    calibration: Sequence[Sequence[int]],
) -> Deployed:
    if isinstance(source, StoredPolicy):
        policy, made, weights = source.policy, stored_plan(source, rules, prompts=calibration), source
        is_known = source.stored.cache is not None
    else:
        policy, made, weights = source, _plan(source, rules, placement, calibration), source.model
        is_known = _is_fp4_run(_summary(policy))
        apply(policy.model, made, arithmetic=placement.arithmetic)
    defaults = policy.defaults
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        stop_token_ids=defaults.stop_token_ids,
    )
    cache = _cache_line(made, "of the run" if is_known else f"calibrated on {len(calibration)} prompts")
    return Deployed(
        policy=policy, plan=made, params=params, weights=weights, cache=cache, placement=placement
    )


def _cache_line(made: Plan, origin: str) -> str:
    schemes = {layer.kv.name for layer in made.layers if layer.kv is not None}
    return f"K and V: {', '.join(schemes)}, exponents {origin}" if schemes else "K and V: bf16"


def _plan(
    policy: Policy, rules: PlanRules, placement: Placement, calibration: Sequence[Sequence[int]]
) -> Plan:
    """Round as the run that wrote this checkpoint did, or calibrate."""
    summary = _summary(policy)
    if rules.mode == "fp4" and _is_fp4_run(summary):
        return remembered_plan(policy.model, rules, summary=summary)
    return calibrated_plan(policy, rules, prompts=calibration, arithmetic=placement.arithmetic)


def _is_fp4_run(summary: dict[str, Any]) -> bool:
    return bool(summary) and rules_of(summary).mode == "fp4"


def _summary(policy: Policy) -> dict[str, Any]:
    """The plan of the run that wrote this checkpoint; {} when no run did."""
    if not (policy.path / "state.json").is_file():
        return {}
    return checkpoint.load_state(policy.path).plan


def _evaluation_params(config: RunConfig, defaults: SamplingParams, *, samples: int) -> SamplingParams:
    rollout = config.rollout
    if samples < 1:
        raise ConfigError(f"evaluate_checkpoint needs at least 1 sample per item; got {samples}. Use 1.")
    params = replace(defaults, max_tokens=rollout.max_tokens, n=samples, seed=EVALUATION_SEED)
    if samples == 1:
        return replace(params, temperature=config.run.eval_temperature, top_p=1.0, top_k=0)
    return replace(
        params,
        temperature=params.temperature if rollout.temperature is None else rollout.temperature,
        top_p=params.top_p if rollout.top_p is None else rollout.top_p,
        top_k=params.top_k if rollout.top_k is None else rollout.top_k,
    )


def _sizes(prompts: Sequence[Sequence[int]], params: SamplingParams) -> RolloutConfig:
    """An engine that holds what is asked for: up to 64 sequences of the longest length at once."""
    sizes = RolloutConfig()
    batch = min(sizes.max_batch, len(prompts) * params.n)
    longest = max(map(len, prompts)) + params.max_tokens
    pages = batch * (longest // sizes.page_size + 2)
    return replace(sizes, num_pages=max(pages, sizes.num_pages))
