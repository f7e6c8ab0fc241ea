"""One tiny model on both sides of a run: transformers patched by a calibrated FP4 plan, and our engine."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.models.test_qwen3_moe import Observer, run_in_chunks
from tests.models.tiny_models import tiny_model

from tracefp4.formats.arithmetic import CONTROL, Arithmetic
from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.session import record, replay
from tracefp4.models import Qwen3MoeEngineModel
from tracefp4.patching import Plan, PlanRules, apply, calibrate, plan
from tracefp4.rl.batching import Batch, pad, token_logprobs
from tracefp4.rl.samples import TrainingSample
from tracefp4.rollout import LocalEngine, SamplingParams

VOCABULARY = 40


@dataclass
class Chain:
    """A patched model, its plan, and the arithmetic of both sides."""

    model: Any
    plan: Plan
    arithmetic: Arithmetic

    def engine(self, **changes) -> LocalEngine:
        settings = {
            "num_pages": 256,
            "page_size": 4,
            "max_batch": 8,
            "max_tokens_per_step": 64,
            "records": True,
        }
        return LocalEngine(
            self.model.config,
            self.model.state_dict(),
            precision=self.plan.layers,
            arithmetic=self.arithmetic,
            plan_digest=self.plan.digest,
            **(settings | changes),
        )

    def engine_pass(self, tokens, chunks):
        """Logits [T, V] and decisions of the engine's model, `chunks` tokens at a time."""
        engine_model = Qwen3MoeEngineModel(
            self.model.config, self.model.state_dict(), precision=self.plan.layers, arithmetic=self.arithmetic
        )
        logits, rows = run_in_chunks(engine_model, tokens, chunks)
        return logits[0], rows

    def logits(self, batch: Batch):
        return self.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.model_positions(),
            use_cache=False,
        ).logits

    @torch.no_grad()
    def trainer_pass(self, batch: Batch):
        """Logits and decisions of every sample, without its padding: [T, V] and rows by site, per row."""
        observer = Observer()
        with record(observer):
            logits = self.logits(batch)
        return [
            (logits[row][mask], {key: _real(parts, batch, row) for key, parts in observer.rows().items()})
            for row, mask in enumerate(batch.attention_mask)
        ]

    @torch.no_grad()
    def replayed(self, batch: Batch, records, **options):
        """Logits under replay, and the counters."""
        replayed = ReplayBatch(positions=batch.positions, records=records, **options)
        with replay(replayed):
            return self.logits(batch), replayed.counters

    def rollouts(self, *, num_prompts=3, max_tokens=12, n=1) -> list[TrainingSample]:
        """Sample completions with the engine, records and all."""
        generator = torch.Generator().manual_seed(1)
        prompts = [
            torch.randint(0, VOCABULARY, (3 + i % 5,), generator=generator).tolist()
            for i in range(num_prompts)
        ]
        groups = self.engine().generate(prompts, SamplingParams(max_tokens=max_tokens, n=n))
        return [
            TrainingSample(
                trajectory=c.record.identity.trajectory,
                prompt_ids=tuple(c.prompt_ids),
                token_ids=tuple(c.token_ids),
                rollout_logprobs=tuple(c.logprobs),
                weight_versions=tuple(c.weight_versions),
                record=c.record,
            )
            for group in groups
            for c in group
        ]

    def batch(self, samples, **options) -> Batch:
        return pad(samples, pad_id=0, dtype=self.arithmetic.torch_dtype, **options)


def _real(parts, batch: Batch, row: int):
    """The rows of one sample's tokens; a site may have several rows per token."""
    places = batch.attention_mask.numel()
    mask = batch.attention_mask[row]
    found = []
    for part in parts:
        per_token = part.view(places, -1, *part.shape[1:]) if part.dim() else part
        found.append(per_token.view(len(batch.attention_mask), len(mask), *per_token.shape[1:])[row][mask])
    return tuple(found)


def make_chain(*, arithmetic=CONTROL, seed=0, rules=None, model=None, **changes) -> Chain:
    model = tiny_model(seed, vocab_size=VOCABULARY, **changes) if model is None else model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(0.125)  # so that K and V have different exponents
    made = plan(model, rules or PlanRules(guidance="mantissa"))
    applied = apply(model, made, arithmetic=arithmetic)
    tokens = torch.randint(0, VOCABULARY, (4, 16))
    made = calibrate(model, made, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert all(layer.k_exponent != layer.v_exponent for layer in made.layers if layer.kv)
    applied.undo()
    apply(model, made, arithmetic=arithmetic)
    return Chain(model=model, plan=made, arithmetic=arithmetic)


def make_samples(lengths, *, seed=0) -> list[TrainingSample]:
    """Random token sequences without a rollout behind them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n, length in enumerate(lengths):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        found.append(
            TrainingSample(
                trajectory=str(n),
                prompt_ids=tuple(ids[:1]),
                token_ids=tuple(ids[1:]),
                rollout_logprobs=(0.0,) * (length - 1),
                weight_versions=(0,) * (length - 1),
            )
        )
    return found


def shifted(record, by=1):
    """The same decisions, each attached to the position `by` places before its own (after it, if negative)."""
    if by < 0:
        return replace(record.rows(0, record.length + by), start=record.start - by)
    return replace(record.rows(by, record.length), start=record.start)


def mismatch(batch: Batch, logits) -> float:
    """Mean |log p_trainer - log p_rollout| over completion tokens."""
    found = token_logprobs(logits, input_ids=batch.input_ids, mask=batch.completion_mask)
    return float((found - batch.rollout_logprobs)[batch.completion_mask].abs().mean())
