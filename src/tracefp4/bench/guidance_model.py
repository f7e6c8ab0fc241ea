"""The model that `bench guidance` measures: a small Qwen3-MoE, trained here on arithmetic, the last part of it in FP4.

Text is an endless line of results, `(12+34)-5=41;`, one token per character. Seven tenths of the steps are bf16, the
rest quantize experts and KV cache as the rollout will (nearest rounding, straight-through gradients), because a model
that never saw FP4 gives log-probs whose mismatch says little about one that is trained with it. Weights stay float32
masters; every forward uses their bf16 copies. This module trains and encodes text; it measures nothing.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED, NATIVE, Arithmetic
from tracefp4.patching import PlanRules, apply, plan
from tracefp4.rl.config import RolloutConfig
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.planning import calibrated_plan
from tracefp4.rl.policy import Policy, no_progress_bars, policy_of
from tracefp4.rl.schedule import warmup_constant, warmup_linear
from tracefp4.rl.tiny import END, PAD, TinyShape, build_model

OnEvent = Callable[[str], None]
CHARACTERS = "0123456789+-*=;() "
FP4_FROM = 0.7
"""Share of the training after which forward passes are FP4."""
WEIGHT_DECAY, LEAST_LR = 0.01, 0.1
WARMUP_PARTS = 20
"""The learning rate rises over one twentieth of the steps."""
EVENT_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of the suite: the model, its training, and the rollout that is scored."""

    name: str
    """As given on the command line."""
    shape: TinyShape
    """Shape of the model."""
    steps: int
    """Optimizer steps."""
    lr: float
    """Peak learning rate."""
    seconds: float
    """Wall time after which training ends early; schedule and FP4 part follow whichever of the two is further on."""
    batch_size: int
    """Sequences per step."""
    num_tokens: int
    """Tokens of a training sequence."""
    num_texts: int
    """Sequences in the training set."""
    num_sequences: int
    """Sequences of the rollout."""
    prompt_tokens: int
    """Tokens of every prompt."""
    completion_tokens: int
    """Tokens sampled after every prompt, at temperature 1."""

    @property
    def rollout(self) -> RolloutConfig:
        """Engine sizes that hold the whole rollout at once."""
        length = self.prompt_tokens + self.completion_tokens
        return RolloutConfig(
            num_prompts=self.num_sequences,
            samples_per_prompt=1,
            max_tokens=self.completion_tokens,
            temperature=1.0,
            num_pages=self.num_sequences * (length // 16 + 2),
            max_batch=self.num_sequences,
            max_tokens_per_step=max(2048, self.num_sequences * self.prompt_tokens),
        )


def _size(
    name: str, shape: TinyShape, train: tuple[int, float, float, int, int, int], rollout: tuple[int, int, int]
) -> Size:
    steps, lr, seconds, batch_size, num_tokens, num_texts = train
    num_sequences, prompt_tokens, completion_tokens = rollout
    return Size(
        name=name,
        shape=shape,
        steps=steps,
        lr=lr,
        seconds=seconds,
        batch_size=batch_size,
        num_tokens=num_tokens,
        num_texts=num_texts,
        num_sequences=num_sequences,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


_TINY = TinyShape(
    num_layers=2, hidden_size=64, num_heads=2, head_dim=32, num_experts=8, top_k=2, expert_size=32
)
_H200 = TinyShape(
    num_layers=12, hidden_size=512, num_heads=8, head_dim=64, num_experts=32, expert_size=256, init_std=0.02
)
_WIDE = TinyShape(
    num_layers=6, hidden_size=2048, num_heads=8, head_dim=256, num_experts=32, expert_size=256, init_std=0.02
)
SIZES = {
    size.name: size
    for size in (
        _size("tiny", _TINY, (60, 1e-3, 60.0, 8, 49, 200), (6, 12, 20)),
        _size("cpu", TinyShape(), (1500, 1e-3, 170.0, 16, 193, 3000), (24, 24, 96)),
        _size("h200", _H200, (2000, 1e-3, 240.0, 128, 193, 20000), (96, 24, 160)),
        _size("wide", _WIDE, (1200, 4e-4, 240.0, 64, 193, 20000), (48, 24, 160)),
    )
}
"""`wide` has the row widths of Qwen3.5-35B-A3B (2048 for x, 2 x 256 for K and V), so that codes of up to 512 values and
128 scales work at their full length."""


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_size(device: torch.device) -> Size:
    """Return the size for a device."""
    return SIZES["cpu" if device.type == "cpu" else "h200"]


def arithmetic_of(device: torch.device) -> Arithmetic:
    """Return real bf16 on an accelerator, emulated bf16 on a CPU."""
    return EMULATED if device.type == "cpu" else NATIVE


def text_of(generator: random.Random, *, num_characters: int) -> str:
    """Return results in a row, at least this many characters, starting with a whole one."""
    parts, length = [], 0
    while length < num_characters:
        a, b, c = (generator.randint(0, 99) for _ in range(3))
        first, second = generator.choice("+-*"), generator.choice("+-")
        inner = {"+": a + b, "-": a - b, "*": a * b}[first]
        parts.append(f"({a}{first}{b}){second}{c}={inner + c if second == '+' else inner - c};")
        length += len(parts[-1])
    return "".join(parts)


def token_rows(tokenizer: Any, *, num_rows: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Return rows of arithmetic, each exactly `num_tokens` ids long, the same ones for the same seed.

    Args:
        tokenizer: any tokenizer of plain text; one that merges characters sees more results per row.
        num_rows: rows.
        num_tokens: ids per row.
        seed: another seed gives other results.

    Raises:
        ConfigError: the tokenizer merges so much that a text is too short.
    """
    generator = random.Random(seed)
    texts = [text_of(generator, num_characters=4 * num_tokens) for _ in range(num_rows)]
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    shortest = min(map(len, rows))
    if shortest < num_tokens:
        raise ConfigError(
            f"bench guidance: the tokenizer makes {shortest} tokens of {4 * num_tokens} characters of arithmetic; "
            f"{num_tokens} are needed. Measure a model whose tokenizer keeps digits apart."
        )
    return [row[:num_tokens] for row in rows]


def build_character_tokenizer() -> Any:
    """Build a tokenizer of single characters, with padding and an end token that the text never has."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((PAD, END, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def train_model(
    size: Size, *, device: torch.device, seed: int = 0, on_event: OnEvent = lambda text: None
) -> Policy:
    """Train the suite's model from random weights.

    Args:
        size: shape and length of the training.
        device: where it runs and where the model stays.
        seed: of weights, texts and batches.
        on_event: called with one line of text every few seconds.

    Returns:
        The policy, float32 weights on the device, not patched. Its directory is not a real one.
    """
    tokenizer = build_character_tokenizer()
    model = build_model(size.shape, tokenizer=tokenizer, seed=seed).to(device)
    policy = policy_of(model, tokenizer, path=Path("bench-guidance-model"))
    rows = token_rows(tokenizer, num_rows=size.num_texts, num_tokens=size.num_tokens, seed=seed)
    training = _Training(size=size, policy=policy, rows=torch.tensor(rows, device=device), on_event=on_event)
    training.run(seed)
    return policy


def save_policy(policy: Policy, path: Path) -> None:
    """Write a Hugging Face checkpoint with float32 weights, for `--model`."""
    path.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)


@dataclass(kw_only=True)
class _Training:
    """One training from random weights to float32 masters in the model."""

    size: Size
    policy: Policy
    rows: Tensor
    on_event: OnEvent
    started_s: float = field(default_factory=time.monotonic)
    told_s: float = 0.0

    def run(self, seed: int) -> None:
        """Train in bf16, then in FP4, and leave the masters in the model."""
        policy, arithmetic = self.policy, arithmetic_of(self.rows.device)
        applied = apply(policy.model, plan(policy.model, BF16_RULES), arithmetic=arithmetic)
        optimizer = MasterWeightAdamW(policy.model, lr=self.size.lr, weight_decay=WEIGHT_DECAY)
        order = torch.Generator().manual_seed(seed)
        step, is_fp4 = 0, False
        while (progress := self._progress(step)) < 1:
            if progress >= FP4_FROM and not is_fp4:
                applied.undo()
                prompts = self.rows[: self.size.num_sequences].tolist()
                made = calibrated_plan(policy, NEAREST_RULES, prompts=prompts, arithmetic=arithmetic)
                applied, is_fp4 = apply(policy.model, made, arithmetic=arithmetic), True
            chosen = torch.randint(0, len(self.rows), (self.size.batch_size,), generator=order)
            loss = next_token_loss(policy.model, self.rows[chosen.to(self.rows.device)])
            loss.backward()
            # a schedule of progress, not of steps, so that it also fits a training that the clock ends
            decay = warmup_linear(int(1000 * progress), warmup_steps=0, total_steps=1000, floor=LEAST_LR)
            rise = warmup_constant(step, warmup_steps=self.size.steps // WARMUP_PARTS)
            optimizer.step(lr_scale=decay * rise, grad_clip=1.0)
            step += 1
            self._tell(step, loss, is_fp4)
        applied.undo()
        for parameter, master in zip(policy.model.parameters(), optimizer.masters, strict=True):
            parameter.data, parameter.grad = master.detach().clone(), None

    def _progress(self, step: int) -> float:
        return max(step / self.size.steps, (time.monotonic() - self.started_s) / self.size.seconds)

    def _tell(self, step: int, loss: Tensor, is_fp4: bool) -> None:
        now_s = time.monotonic()
        if step == 1 or step == self.size.steps or now_s - self.told_s >= EVENT_EVERY_S:
            self.told_s = now_s
            arithmetic = "FP4" if is_fp4 else "bf16"
            self.on_event(f"training step {step}/{self.size.steps} in {arithmetic}: loss {loss.item():.3f}")


BF16_RULES = PlanRules(mode="bf16", guidance="none")
NEAREST_RULES = PlanRules(guidance="none")


def next_token_loss(model: Any, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token over rows of real tokens [B, T], nats."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def prompts_of(policy: Policy, size: Size, *, seed: int) -> Sequence[list[int]]:
    """Return the prompts of a rollout; seeds other than the training's give texts that were never trained on."""
    return token_rows(policy.tokenizer, num_rows=size.num_sequences, num_tokens=size.prompt_tokens, seed=seed)
