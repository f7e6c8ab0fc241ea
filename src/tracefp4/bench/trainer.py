"""The suite `trainer`: a whole training step that follows records, beside the same step in BF16, on real shapes.

The first layers of a known model, random weights, one model object that is patched in turn: BF16, FP4 rounded to
nearest, FP4 following the records of our own engine, which has computed the same tokens. A step is what `rl` does with
samples: micro-batches forward and backward, then the optimizer. Turns alternate and the median counts. The head is cut
to a small vocabulary: it is equal on both sides and would hide the difference.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tracefp4.bench.engine_shapes import config_of, measured_shape
from tracefp4.bench.row import BenchRow, Check, Machine, describe_machine
from tracefp4.guidance.joining import recode_all
from tracefp4.patching import Plan, PlanRules, apply, calibrate, plan
from tracefp4.patching.shapes import ModelShape
from tracefp4.rl.config import ModelConfig, RolloutConfig
from tracefp4.rl.losses import LossConfig
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.placement import Placement, placement_of
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.sync import build_engine
from tracefp4.rl.trainer import PolicyTrainer
from tracefp4.rollout import SamplingParams

ARMS = {
    "bf16": PlanRules(mode="bf16", guidance="none"),
    "nearest": PlanRules(guidance="none"),
    "guided": PlanRules(),
}
GIB = 1 << 30
_RATE = 0.0
"""The optimizer computes everything and moves nothing: weights that moved from turn to turn would leave behind the
records, which are of the first ones."""
_NEVER_SAMPLED = -8.0
"""A log-prob under which the rollout could have drawn any token; the loss only needs numbers."""
OnEvent = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSizes:
    """What is measured."""

    shape: ModelShape
    """The model; its name, which says how many layers are left of it, is part of the rows' ids."""
    name: str
    """The shape in row ids, e.g. `qwen3-30b-a3b.4_layers`."""
    tokens: tuple[int, ...] = (32768, 8192)
    """Tokens of a step, one row each."""
    micro_batch_tokens: int = 8192
    """Tokens of a forward pass."""
    length: int = 1024
    """Tokens of a sample."""
    turns: int = 7
    """Timed steps of each arm; one more is not timed."""


def default_sizes(model: str = "qwen3-30b-a3b", *, layers: int = 4, vocab: int = 1024) -> TrainerSizes:
    """Return the sizes of the suite for a known shape, cut to its first layers.

    Raises:
        ConfigError: an unknown shape, or more layers than it has.
    """
    shape = measured_shape(model, layers=layers)
    return TrainerSizes(
        shape=replace(shape, vocab=min(vocab, shape.vocab)), name=f"{model.lower()}.{layers}_layers"
    )


def run_trainer(
    sizes: TrainerSizes, *, device: str = "auto", seed: int = 0, on_event: OnEvent = lambda text: None
) -> list[BenchRow]:
    """Measure one row for every number of tokens.

    Args:
        sizes: what is measured.
        device: as `model.device` of a recipe; a CPU computes in emulated arithmetic, which says nothing about a GPU.
        seed: of weights and tokens.
        on_event: called with one line of text for every stage.

    Raises:
        ConfigError: the device is not there.
    """
    placement = placement_of(ModelConfig(path="", device=device))
    bed = _Bed(sizes, placement, seed=seed, on_event=on_event)
    machine = describe_machine(placement.device if placement.device.type == "cuda" else None)
    rows = []
    for tokens in sizes.tokens:
        on_event(f"{sizes.name}: steps of {tokens} tokens")
        rows.append(bed.measure(bed.samples[: tokens // sizes.length], machine=machine))
    return rows


class _Bed:
    """One model, its optimizer, and samples with records."""

    def __init__(self, sizes: TrainerSizes, placement: Placement, *, seed: int, on_event: OnEvent) -> None:
        self.sizes, self.placement = sizes, placement
        self.model = _build_model(sizes, placement, seed=seed)
        on_event(f"{sum(p.numel() for p in self.model.parameters()) / 1e9:.2f} billion parameters")
        generator = torch.Generator().manual_seed(seed)
        count = max(sizes.tokens) // sizes.length
        # the engine samples the last token of every sample
        shape = (count, sizes.length - 1)
        prompts = torch.randint(sizes.shape.vocab, shape, generator=generator, device="cpu")
        self.plans = {name: self._plan(rules, prompts) for name, rules in ARMS.items()}
        on_event(f"records of {count} x {sizes.length} tokens")
        self.whole = self._rollout(self.plans["guided"], prompts.tolist())
        gc.collect()  # the engine is gone, or its bytes would count in every arm's peak
        self.samples = _recoded(self.whole, self.plans["guided"])
        self.optimizer = MasterWeightAdamW(
            self.model, lr=_RATE, emulates_bf16=placement.arithmetic.emulates_bf16
        )

    def measure(self, samples: Sequence[TrainingSample], *, machine: Machine) -> BenchRow:
        """Time steps on these samples in every arm; return the row."""
        peaks = dict.fromkeys(ARMS, 0)
        spent: dict[str, list[float]] = {name: [] for name in ARMS}
        for turn in range(self.sizes.turns + 1):
            for name in ARMS:
                seconds, peak = self._step(name, samples)
                peaks[name] = max(peaks[name], peak)
                if turn:
                    spent[name].append(seconds)
        median = {name: statistics.median(values) for name, values in spent.items()}
        tokens = len(samples) * self.sizes.length
        facts: dict[str, float | str] = {
            "tokens": tokens,
            "micro_batch_tokens": self.sizes.micro_batch_tokens,
        }
        for name in ARMS:
            facts[f"{name} ms"] = 1e3 * median[name]
            facts[f"{name} peak GiB"] = peaks[name] / GIB
            facts[f"{name} spread"] = max(spent[name]) / min(spent[name]) - 1
        facts["nearest beyond BF16 %"] = _beyond(median["nearest"], median["bf16"])
        if peaks["bf16"]:
            facts["peak memory beyond BF16 %"] = _beyond(peaks["guided"], peaks["bf16"])
        facts["guided tokens/s"] = tokens / median["guided"]
        return BenchRow(
            id=f"trainer.{self.sizes.name}.{tokens // 1024}k",
            metric="time of a guided training step beyond the same step in BF16",
            value=_beyond(median["guided"], median["bf16"]),
            unit="%",
            backend=f"{self.placement.arithmetic.name}, {self.placement.device.type}",
            peer="none: the same trainer in BF16 is part of the figure",
            peer_value=None,
            limit=None,
            machine=machine,
            better="less",
            check=self._check(),
            facts=facts,
        )

    def _step(self, arm: str, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Seconds and peak bytes of one whole step."""
        kept = samples if arm == "guided" else [replace(sample, record=None) for sample in samples]
        device = self.placement.device
        applied = apply(self.model, self.plans[arm], arithmetic=self.placement.arithmetic)
        try:
            trainer = self._trainer(applied, optimizer=self.optimizer)
            _synchronize(device, resets_peak=True)
            started = time.perf_counter()
            trainer.update(
                kept, old_logprobs=None, ref_logprobs=None, loss=LossConfig(), lr_scale=1.0, grad_clip=1.0
            )
            _synchronize(device)
            seconds = time.perf_counter() - started
        finally:
            applied.undo()
        return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0

    def _check(self) -> Check:
        """Compare codes after guidance with the rollout's, on one micro-batch of samples with whole records."""
        applied = apply(self.model, self.plans["guided"], arithmetic=self.placement.arithmetic)
        try:
            count = self.sizes.micro_batch_tokens // self.sizes.length
            scored = self._trainer(applied).score(self.whole[:count], measure=True)
        finally:
            applied.undo()
        counts = scored.agreement.values()
        compared = sum(int(found.compared) for found in counts)
        before, after = (
            sum(int(getattr(found, f"mismatched_{when}")) for found in counts) / max(1, compared)
            for when in ("before", "after")
        )
        text = "share of codes that differ from the engine's after guidance, beside half the share before"
        return Check(error=after if compared else float("nan"), allowed=before / 2, text=text)

    def _trainer(self, applied: Any, optimizer: MasterWeightAdamW | None = None) -> PolicyTrainer:
        return PolicyTrainer(
            applied=applied,
            arithmetic=self.placement.arithmetic,
            pad_id=0,
            temperature=1.0,
            micro_batch_tokens=self.sizes.micro_batch_tokens,
            optimizer=optimizer,
        )

    def _plan(self, rules: PlanRules, prompts: torch.Tensor) -> Plan:
        """The plan of an arm, calibrated on one sample."""
        made = plan(self.model, rules)
        if not made.static_exponents:
            return made
        applied = apply(self.model, made, arithmetic=self.placement.arithmetic)
        try:
            ids = prompts[:1].to(self.placement.device)
            return calibrate(self.model, made, input_ids=ids, attention_mask=torch.ones_like(ids))
        finally:
            applied.undo()

    def _rollout(self, chosen: Plan, prompts: list[list[int]]) -> list[TrainingSample]:
        """Samples of the prompts' own tokens with the engine's whole records, which prefill made."""
        sizes = self.sizes
        pages = -(-(sizes.length + 1) // 16) + 1
        rollout = RolloutConfig(
            num_pages=pages * 16,
            max_batch=16,
            max_tokens_per_step=sizes.micro_batch_tokens,
            samples_per_prompt=1,
        )
        applied = apply(self.model, chosen, arithmetic=self.placement.arithmetic)
        try:
            engine = build_engine(
                self.model, chosen, arithmetic=self.placement.arithmetic, rollout=rollout, records=True
            )
            groups = engine.generate(prompts, SamplingParams(max_tokens=1))
        finally:
            applied.undo()
        return [_as_trained(group[0], reward=float(i % 2)) for i, group in enumerate(groups)]


def _build_model(sizes: TrainerSizes, placement: Placement, *, seed: int) -> Any:
    """Random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), placement.device:
        torch.manual_seed(seed)
        config = config_of(sizes.shape, max_positions=sizes.length + 1)
        return AutoModelForCausalLM.from_config(config, dtype=placement.arithmetic.torch_dtype).eval()


def _as_trained(completion: Any, *, reward: float) -> TrainingSample:
    """A prompt and the token after it as a sample: all tokens but the first count as sampled and are in the loss."""
    ids = (*completion.prompt_ids, *completion.token_ids)
    return TrainingSample(
        trajectory=completion.record.identity.trajectory,
        prompt_ids=ids[:1],
        token_ids=ids[1:],
        rollout_logprobs=(_NEVER_SAMPLED,) * (len(ids) - 1),
        weight_versions=(0,) * (len(ids) - 1),
        finish_reason="stop",
        is_truncated=False,
        reward=reward,
        advantage=2 * reward - 1,
        record=completion.record,
    )


def _recoded(samples: Sequence[TrainingSample], chosen: Plan) -> list[TrainingSample]:
    """The samples with their records in the plan's codecs, as a rollout hands them over."""
    records = recode_all([sample.record for sample in samples], chosen.codecs)
    return [replace(sample, record=record) for sample, record in zip(samples, records, strict=True)]


def _beyond(value: float, other: float) -> float:
    """How much larger, in percent."""
    return 100 * (value / other - 1)


def _synchronize(device: torch.device, *, resets_peak: bool = False) -> None:
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    if resets_peak:
        torch.cuda.reset_peak_memory_stats(device)
