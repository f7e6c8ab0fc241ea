"""Load a local Hugging Face checkpoint of a supported MoE family, with its tokenizer and generation defaults."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefp4.errors import ConfigError
from tracefp4.patching.plan import SUPPORTED_ARCHITECTURES

if TYPE_CHECKING:
    from tracefp4.rl.placement import Placement

LOADED_ARCHITECTURES = (*SUPPORTED_ARCHITECTURES, "Qwen3_5MoeForConditionalGeneration")
"""What a checkpoint may be. Of one that sees images the text part is loaded, and is what a run saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What the checkpoint's generation config says."""

    stop_token_ids: tuple[int, ...]
    """Every id that ends a completion."""
    temperature: float
    """1 when the file does not say."""
    top_p: float
    """1 (off) when the file does not say."""
    top_k: int
    """0 (off) when the file does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A loaded checkpoint."""

    model: Any
    """transformers' own class, in eval mode; float32 unless it was loaded for another arithmetic."""
    tokenizer: Any
    """The checkpoint's tokenizer."""
    defaults: GenerationDefaults
    """EOS and sampling defaults."""
    path: Path
    """Where it was loaded from."""

    @property
    def pad_id(self) -> int:
        """Token id for padding: the tokenizer's, else its EOS (masks never look at ids)."""
        pad = self.tokenizer.pad_token_id
        return int(self.defaults.stop_token_ids[0] if pad is None else pad)


def load_policy(path: str | Path, *, placement: "Placement | None" = None) -> Policy:
    """Load model, tokenizer and generation defaults.

    Args:
        path: a local checkpoint.
        placement: device of the model, and the arithmetic whose dtype its parameters get; None: the CPU, float32.

    Raises:
        ConfigError: no such directory, no config.json, an unsupported architecture, no tokenizer, no weights, or
            weights that are FP4.
    """
    directory = checked_directory(path)
    if "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8")):
        raise ConfigError(
            f"model.path: {directory} is a quantized checkpoint, which can be evaluated and sampled from, but not "
            "trained. Give the checkpoint that it was made from, or decode it with `tracefp4 import --dequantize`."
        )
    return policy_of(_loaded(directory, placement), load_tokenizer(directory), path=directory)


def policy_of(model: Any, tokenizer: Any, *, path: Path) -> Policy:
    """Put a loaded model and its tokenizer together.

    Raises:
        ConfigError: neither names an end-of-sequence token.
    """
    return Policy(model=model, tokenizer=tokenizer, defaults=generation_defaults(model, tokenizer), path=path)


def checked_directory(path: str | Path) -> Path:
    """Return the directory of a checkpoint that can be loaded and has a tokenizer.

    Raises:
        ConfigError: it is none.
    """
    directory = Path(path)
    config_file = directory / "config.json"
    if not config_file.is_file() or (directory / "metrics.jsonl").exists():
        raise ConfigError(
            f"model.path: {directory} is not a checkpoint (no config.json of a model). {_where_to_look(directory)}"
        )
    try:
        architectures = json.loads(config_file.read_text(encoding="utf-8")).get("architectures") or [
            "model of no named architecture"
        ]
    except ValueError as error:
        raise ConfigError(
            f"model.path: {config_file} is not valid JSON: {error}. Download the checkpoint again."
        ) from error
    if not set(architectures) & set(LOADED_ARCHITECTURES):
        raise ConfigError(
            f"model.path: {directory} is a {architectures[0]}, which is not a supported mixture-of-experts model; "
            f"supported: {', '.join(LOADED_ARCHITECTURES)}."
        )
    if not any(
        (directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ):
        raise ConfigError(
            f"model.path: {directory} has no tokenizer (tokenizer.json). Copy the tokenizer files of the base "
            "model there."
        )
    return directory


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        ConfigError: its files cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: the tokenizer of {directory} could not be loaded: {error}. Download it again."
        ) from error


def _loaded(directory: Path, placement: "Placement | None") -> Any:
    """The model; a weight that the files lack is an error, never a random tensor."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    dtype: torch.dtype = torch.float32 if placement is None else placement.arithmetic.torch_dtype
    try:
        with no_progress_bars():
            model, found = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model.path: {directory} could not be loaded: {error}. Check its files, or download it again."
        ) from error
    missing = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if missing:
        raise ConfigError(
            f"model.path: {directory} lacks {len(missing)} weights of its model, e.g. {', '.join(missing[:3])}. "
            "Download the checkpoint again."
        )
    return model.eval() if placement is None else model.eval().to(placement.device)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for every load and save inside."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def generation_defaults(model: Any, tokenizer: Any) -> GenerationDefaults:
    """Read EOS ids and sampling defaults of a loaded model.

    Raises:
        ConfigError: neither generation config nor tokenizer names an EOS.
    """
    config = model.generation_config
    eos = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(
            "model.path: neither generation_config.json nor the tokenizer names an end-of-sequence token. "
            'Add "eos_token_id" to generation_config.json.'
        )
    stops = tuple(int(i) for i in eos) if isinstance(eos, list | tuple) else (int(eos),)
    return GenerationDefaults(
        stop_token_ids=stops,
        temperature=float(config.temperature) if config.temperature is not None else 1.0,
        top_p=float(config.top_p) if config.top_p is not None else 1.0,
        top_k=int(config.top_k) if config.top_k else 0,
    )


def _where_to_look(directory: Path) -> str:
    """Say where the checkpoint is that was probably meant."""
    saved = sorted(directory.glob("checkpoints/step_*")) or sorted(directory.glob("*/checkpoints/step_*"))
    if saved:
        return f"The checkpoints of a run lie below it; the newest here is {saved[-1]}."
    if not directory.exists() and len(directory.parts) == 2 and not directory.is_absolute():
        return f"Nothing is downloaded: fetch {directory} with Hugging Face's own tools and give the local directory."
    return "Give a local directory with weights and tokenizer."
