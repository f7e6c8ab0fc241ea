"""Run a model over texts and collect what its routed experts saw: sums of squares per channel, and maxima.

Works for every family whose experts go through transformers' experts interface (all of `names.py`): for the time of
the run, this module's implementation of the experts stands in. It computes the same layer, one expert after the
other, in the model's dtype; sums are float64, so neither the number of tokens nor their batches matter to the digits
that are stored. Weights stay as they are: statistics are those of the unquantized model. Never decides a scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.checkpoints.source import CONFIG, Checkpoint
from tracefp4.checkpoints.statistics import LayerStatistics, Statistics, model_digest
from tracefp4.checkpoints.texts import token_sequences
from tracefp4.errors import ConfigError

OnTokens = Callable[[int, int], None]
IMPLEMENTATION = "tracefp4_statistics"
"""The name under which transformers knows the experts of this module."""
_BATCH_TOKENS = 8192
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def collect_statistics(
    checkpoint: str | Path,
    texts: str | Path,
    *,
    max_tokens: int,
    sequence_length: int,
    device: str = "cpu",
    on_tokens: OnTokens | None = None,
) -> Statistics:
    """Load a checkpoint, run it over texts, and return what its experts saw.

    Args:
        checkpoint: a directory in Hugging Face's layout, unquantized, with its tokenizer.
        texts: a .txt or .jsonl file; see `texts.py`.
        max_tokens: where to stop, >= 1.
        sequence_length: tokens per sequence, >= 1.
        device: where the model runs; it must hold all of it. On the CPU in float32, elsewhere in its stored dtype.
        on_tokens: called with (tokens done, tokens in all) after every batch.

    Raises:
        ConfigError: a checkpoint that is quantized or cannot be loaded, no routed experts, unusable texts.
    """
    with Checkpoint(checkpoint) as opened:
        config = opened.config
    if "quantization_config" in config:
        raise ConfigError(
            f"{checkpoint} is quantized already ({CONFIG} has quantization_config). Statistics describe the "
            "unquantized model. Name the checkpoint that it was made from."
        )
    sequences, source = token_sequences(
        texts,
        tokenizer=_load_tokenizer(Path(checkpoint)),
        max_tokens=max_tokens,
        sequence_length=sequence_length,
    )
    layers = observe(_load_model(Path(checkpoint), device), sequences, on_tokens=on_tokens)
    num_tokens = sum(len(sequence) for sequence in sequences)
    return Statistics(model=model_digest(config), source=source, num_tokens=num_tokens, layers=layers)


@torch.no_grad()
def observe(
    model: nn.Module, sequences: Sequence[Tensor], *, on_tokens: OnTokens | None = None
) -> dict[int, LayerStatistics]:
    """Run a model over token sequences and return the statistics of every layer with routed experts.

    Args:
        model: a causal language model of transformers; unchanged afterwards.
        sequences: int64 [T] each; neighbours of equal length run together.
        on_tokens: called with (tokens done, tokens in all) after every batch.

    Raises:
        ConfigError: a model without experts in transformers' interface, or values that are not finite.
    """
    device = next(model.parameters()).device
    total, done = sum(len(sequence) for sequence in sequences), 0
    with _observed(model) as sums:
        for batch in _batches(sequences):
            model(input_ids=batch.to(device), use_cache=False, logits_to_keep=1)
            done += batch.numel()
            if on_tokens is not None:
                on_tokens(done, total)
    return {layer: found.statistics(layer) for layer, found in sorted(sums.items())}


class _Sums:
    """Running sums of one layer."""

    def __init__(self, experts: Any) -> None:
        # the down-projection reads I channels; its last dimension in all families but those that store it transposed
        inner = experts.down_proj.shape[1 if experts.is_transposed else 2]
        hidden = experts.gate_up_proj.shape[1 if experts.is_transposed else 2]
        num_experts = experts.gate_up_proj.shape[0]
        self.tokens = torch.zeros(num_experts, dtype=torch.int64)
        self.x = torch.zeros(num_experts, hidden, dtype=torch.float64)
        self.x_all = torch.zeros(hidden, dtype=torch.float64)
        self.w2 = torch.zeros(num_experts, inner, dtype=torch.float64)
        self.amax = torch.zeros(2)
        self.num_tokens = 0

    def see_all(self, x: Tensor) -> None:
        """Take in the layer's input [T, H]."""
        self.x_all += _square_sums(x)
        self.num_tokens += len(x)
        self._see_largest(0, x)

    def see(self, expert: int, x: Tensor, middle: Tensor) -> None:
        """Take in what one expert read: its input [t, H] and the input of its down-projection [t, I]."""
        self.tokens[expert] += len(x)
        self.x[expert] += _square_sums(x)
        self.w2[expert] += _square_sums(middle)
        self._see_largest(1, middle)

    def statistics(self, layer: int) -> LayerStatistics:
        """Return the means."""
        count = self.tokens.clamp(min=1).unsqueeze(-1)
        found = LayerStatistics(
            tokens=self.tokens,
            x_square=(self.x / count).float(),
            x_square_all=(self.x_all / max(self.num_tokens, 1)).float(),
            w2_square=(self.w2 / count).float(),
            amax=self.amax,
        )
        if not all(bool(part.isfinite().all()) for part in (found.x_square_all, found.w2_square, found.amax)):
            raise ConfigError(
                f"The experts of layer {layer} saw values that are not finite. Calibration needs a model that runs "
                "without NaN and Inf. Check the checkpoint, or run it in float32 (device cpu)."
            )
        return found

    def _see_largest(self, which: int, x: Tensor) -> None:
        largest = x.abs().amax().float().cpu()  # NaN stays NaN
        self.amax[which] = torch.maximum(self.amax[which], largest)


def _square_sums(x: Tensor) -> Tensor:
    return x.double().square().sum(0).cpu()


def _observing_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of a layer, one after the other, and take in what each reads; rows [T, H]."""
    sums: _Sums = self.tracefp4_sums
    sums.see_all(hidden_states)
    out = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        rows, slot = torch.where(top_k_index == expert)
        x = hidden_states[rows]
        middle = self._apply_gate(_linear(self, "gate_up_proj", expert, x))
        sums.see(expert, x, middle)
        y = _linear(self, "down_proj", expert, middle) * top_k_weights[rows, slot, None]
        out.index_add_(0, rows, y.to(out.dtype))
    return out


def _linear(experts: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return nn.functional.linear(x, weight.T if experts.is_transposed else weight, bias)


@contextmanager
def _observed(model: Any) -> Iterator[dict[int, _Sums]]:
    """Let every experts module of a model keep sums; undone on leaving."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _observing_forward)
    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if type(module).__name__.endswith("Experts") and hasattr(module, "_apply_gate") and layer:
            found[int(layer[1])] = module
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no routed experts behind transformers' experts interface. Statistics are "
            "those of routed experts. Name a mixture of experts."
        )
    before = model.config._experts_implementation
    sums = {layer: _Sums(module) for layer, module in found.items()}
    try:
        model.set_experts_implementation(IMPLEMENTATION)
        for index, module in found.items():
            module.tracefp4_sums = sums[index]
        yield sums
    finally:
        model.set_experts_implementation(before)
        for module in found.values():
            if hasattr(module, "tracefp4_sums"):
                del module.tracefp4_sums


def _batches(sequences: Sequence[Tensor]) -> Iterator[Tensor]:
    """Stack neighbours of equal length, up to a number of tokens."""
    start = 0
    while start < len(sequences):
        length = len(sequences[start])
        stop = start + 1
        while (
            stop < len(sequences)
            and len(sequences[stop]) == length
            and (stop + 1 - start) * length <= _BATCH_TOKENS
        ):
            stop += 1
        yield torch.stack(list(sequences[start:stop]))
        start = stop


def _load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        # without files, transformers makes an empty tokenizer of the model's class
        raise ConfigError(
            f"{directory} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). Texts need the model's own. Copy "
            "the tokenizer files of the base model there."
        )
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The tokenizer of {directory} could not be loaded: {error}. Texts need the model's own. Copy the "
            "tokenizer files of the base model there."
        ) from error


def _load_model(directory: Path, device: str) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    dtype: Any = torch.float32 if device == "cpu" else "auto"
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        model = model.to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError, SafetensorError) as error:
        # an AssertionError is how torch says that it was built without CUDA
        raise ConfigError(
            f"{directory} could not be loaded on {device}: {error}. A whole checkpoint is needed, and memory for all "
            "of it. Check its files, or name another device."
        ) from error
    missing = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} weights of its model, e.g. {', '.join(missing[:3])}. Random ones would "
            "give random statistics. Download the checkpoint again."
        )
    return model
