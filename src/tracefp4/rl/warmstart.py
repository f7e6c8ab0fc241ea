"""Supervised warm start: a tiny model learns the task's format and some of its arithmetic, then RL takes over.

Next-token cross-entropy on worked solutions (tokens of prompts and of environments are not trained), AdamW, linear
decay. Runs in plain float32 on a CPU and in bf16 on a GPU, whose host makes the next examples meanwhile; the saved
checkpoint is an ordinary Hugging Face one in bf16.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tracefp4.formats.arithmetic import NATIVE, Arithmetic
from tracefp4.ops.upload import upload
from tracefp4.patching import PlanRules, apply, plan
from tracefp4.qat.attention import no_mask
from tracefp4.rl.checkpoint import save_model
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.placement import ON_CPU, Placement
from tracefp4.rl.prompts import build_source, encode
from tracefp4.rl.schedule import warmup_linear
from tracefp4.rl.solutions import Part, call_calculator, solve_chain_sum
from tracefp4.rl.tiny import TinyShape, build_model, build_tokenizer

FLOAT32 = Arithmetic(name="float32", dtype="float32", emulates_bf16=False, rounds_probabilities=False)
OnProgress = Callable[[int, int, float], None]
# warm-start items come from far beyond the items that RL and evaluation draw
FIRST_ITEM = 500_000_000
TOKENIZER_TEXTS = 500
REPORT_EVERY = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Constants of the warm start."""

    task: TaskConfig
    """A `chain_sum` task."""
    shape: TinyShape = field(default_factory=TinyShape)
    """Shape of the model."""
    steps: int = 150
    """Optimizer steps."""
    bare_tenths: int = 6
    """How many of ten demonstrations state the result without answer tags."""
    uses_calculator: bool = False
    """Demonstrate calls of the environment `calculator`; its results are not trained."""
    batch_size: int = 64
    """Examples per step, every one new."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    seed: int = 0
    """Seed of the initial weights."""
    placement: Placement = ON_CPU
    """Where it trains; in bf16 with float32 masters where the arithmetic is native, in float32 otherwise."""
    time_limit_s: float = 0.0
    """Wall-clock seconds after which no further step begins; 0: no limit."""


def warm_start(config: WarmStart, *, path: Path, on_progress: OnProgress | None = None) -> float:
    """Train from random weights and save the checkpoint.

    Args:
        config: the constants.
        path: directory of the checkpoint.
        on_progress: called with (step, steps, loss) every 25 steps and after the last.

    Returns:
        The last step's loss, nats per trained token.
    """
    source = build_source(config.task)
    texts = [source.item(FIRST_ITEM + i).prompt for i in range(TOKENIZER_TEXTS)]
    tokenizer = build_tokenizer(_tokenizer_texts(texts, config))
    device, is_native = config.placement.device, config.placement.arithmetic is NATIVE
    model = build_model(config.shape, tokenizer=tokenizer, seed=config.seed).to(device)
    # our experts path is about 1.5 times faster than transformers' own on a CPU
    bf16 = plan(model, PlanRules(mode="bf16", guidance="none"))
    applied = apply(model, bf16, arithmetic=NATIVE if is_native else FLOAT32)
    optimizer = MasterWeightAdamW(
        model, lr=config.lr, weight_decay=0.01, emulates_bf16=False, decays_vectors=True
    )
    started, loss = time.monotonic(), torch.tensor(float("nan"), device="cpu")
    for step in range(config.steps):
        first = FIRST_ITEM + step * config.batch_size
        examples = [_example(source.item(first + i), tokenizer, config) for i in range(config.batch_size)]
        loss = _loss(model, *_padded(examples, pad_id=tokenizer.pad_token_id), device=device)
        loss.backward()
        spent = (time.monotonic() - started) / (config.time_limit_s or math.inf)
        # a schedule over steps or over time, whichever is further: it always ends at its floor
        reached = max(step, int(spent * config.steps))
        scale = warmup_linear(reached, warmup_steps=config.warmup_steps, total_steps=config.steps, floor=0.05)
        optimizer.step(lr_scale=scale, grad_clip=1.0)
        is_last = step + 1 == config.steps or spent >= 1
        if on_progress is not None and (is_last or step % REPORT_EVERY == 0):
            on_progress(step, config.steps, loss.item())
        if is_last:
            break
    applied.undo()
    path.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, path)
    return loss.item()


def _loss(model: Any, input_ids: torch.Tensor, labels: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """Mean cross-entropy of the labelled tokens."""
    logits = model(
        input_ids=upload(input_ids, device),
        attention_mask=no_mask(device),
        is_causal_row=True,
        use_cache=False,
    ).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), upload(labels[:, 1:].flatten(), device), ignore_index=-100
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Example:
    """Token ids of one demonstration with its prompt."""

    input_ids: list[int]
    """All tokens."""
    is_trained: list[bool]
    """For every token: the policy writes it."""


def _tokenizer_texts(questions: Sequence[str], config: WarmStart) -> list[str]:
    """Text to learn merges from: no token spans the policy's text and an environment's."""
    if not config.uses_calculator:
        return [text + solve_chain_sum(text) for text in questions]
    return [
        text
        for question in questions
        for text in (question, *(part.text for part in call_calculator(question)))
    ]


def _parts(task: Any, config: WarmStart) -> list[Part]:
    is_tagged = task.index % 10 >= config.bare_tenths
    if config.uses_calculator:
        return call_calculator(task.prompt, is_tagged=is_tagged)
    return [Part(text=solve_chain_sum(task.prompt, is_tagged=is_tagged), is_sampled=True)]


def _example(task: Any, tokenizer: Any, config: WarmStart) -> _Example:
    input_ids = encode(task, tokenizer=tokenizer)
    is_trained = [False] * len(input_ids)
    for part in _parts(task, config):
        # part by part, as they arise in a rollout
        ids = tokenizer(part.text, add_special_tokens=False)["input_ids"]
        input_ids, is_trained = input_ids + ids, is_trained + [part.is_sampled] * len(ids)
    return _Example(input_ids=[*input_ids, tokenizer.eos_token_id], is_trained=[*is_trained, True])


def _padded(examples: Sequence[_Example], *, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(example.input_ids) for example in examples)
    input_ids = torch.full((len(examples), longest), pad_id, device="cpu")
    labels = torch.full((len(examples), longest), -100, device="cpu")
    for row, example in enumerate(examples):
        ids = torch.tensor(example.input_ids, device="cpu")
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = torch.where(torch.tensor(example.is_trained, device="cpu"), ids, -100)
    return input_ids, labels
