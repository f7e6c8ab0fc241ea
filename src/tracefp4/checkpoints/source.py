"""A checkpoint to read: a directory in Hugging Face's layout, opened and checked as a whole before anything is read.

config.json, and either model.safetensors or shards that model.safetensors.index.json lists. Index and shards must
name the same tensors, each once. Tensors are read one at a time or by rows (`container.py`). Never says what a
tensor is for (`names.py`), and never loads weights that only exist as pickles.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tracefp4.checkpoints.container import ContainerReader
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.errors import ConfigError, FormatError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
# What belongs to a model besides weights and config. Everything else (optimizer states, pickles, weights in other
# layouts, another quantizer's config) stays behind.
CARRIED = (
    "tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "spiece.model",
    "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja", "chat_template.json", "generation_config.json",
    "*processor_config.json", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


class Source(Protocol):
    """What a checkpoint shows to its readers: a plain one, or a packed one under plain names (`packed.py`)."""

    path: Path
    """The directory."""
    config: dict[str, Any]
    """config.json."""
    specs: dict[str, TensorSpec]
    """Every tensor by name."""
    aliases: dict[str, str]
    """Names that share the bytes of a stored tensor."""

    @property
    def ties_embeddings(self) -> bool:
        """True when output head and embedding are one matrix."""

    @property
    def extra_files(self) -> tuple[str, ...]:
        """Files to carry over unchanged."""

    def read(self, name: str) -> Tensor:
        """Return one tensor."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of dimension 0 of one tensor."""


class Checkpoint:
    """An open checkpoint; close it, or use it in a `with` statement.

    Args:
        path: the directory.

    Raises:
        ConfigError: no directory, no config, no safetensors weights, an index that does not fit its shards, or a
            tensor in two shards.
        FormatError: a shard or a JSON file that is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is not a directory. A checkpoint is a local directory with {CONFIG} and safetensors "
                "files. Download the model first, and name its directory."
            )
        self.config: dict[str, Any] = _read_json(self.path, CONFIG)
        """config.json as stored."""
        with ExitStack() as opened:
            self._shards = {
                name: opened.enter_context(_shard(self.path, name)) for name in self._shard_names()
            }
            self.shard_of: dict[str, str] = {}
            """Shard (file name) of every stored tensor."""
            for shard, reader in self._shards.items():
                for name in reader.specs:
                    self._place(name, shard)
            self._check_index()
            self._opened = opened.pop_all()
        self.specs: dict[str, TensorSpec] = {
            name: spec for reader in self._shards.values() for name, spec in reader.specs.items()
        }
        """Every stored tensor by name: shards in order of file name, tensors in order of their bytes."""
        self.aliases: dict[str, str] = self._aliases()
        """Names that share the bytes of a stored tensor: alias -> stored name (safetensors' `save_model`)."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @property
    def ties_embeddings(self) -> bool:
        """True when output head and embedding are one matrix, as config.json says; without a word, no stored head."""
        for config in (self.config, self.config.get("text_config")):
            if isinstance(config, dict) and isinstance(config.get("tie_word_embeddings"), bool):
                return bool(config["tie_word_embeddings"])
        return HEAD not in self.specs

    @property
    def extra_files(self) -> tuple[str, ...]:
        """Files to carry over unchanged (tokenizer, templates, generation config, licence), relative, sorted."""
        found = (path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file())
        return tuple(sorted(name for name in found if any(_is_carried(name, pattern) for pattern in CARRIED)))

    def read(self, name: str) -> Tensor:
        """Return one tensor, freshly allocated. Raises: FormatError for an unknown name."""
        return self._reader(name).read(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (exclusive) of dimension 0. Raises: FormatError as the container's."""
        return self._reader(name).read_rows(name, start, stop)

    def close(self) -> None:
        """Close every shard."""
        self._opened.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _reader(self, name: str) -> ContainerReader:
        if name not in self.shard_of:
            raise FormatError(
                f"{self.path} holds no tensor {name!r}; it holds {len(self.shard_of)}. Ask for one of `specs`."
            )
        return self._shards[self.shard_of[name]]

    def _shard_names(self) -> list[str]:
        has_single, has_index = (self.path / SINGLE).exists(), (self.path / INDEX).exists()
        if has_single and has_index:
            raise ConfigError(
                f"{self.path} holds both {SINGLE} and {INDEX}, and they may be two models. A checkpoint has one of "
                "them. Remove the one that is out of date."
            )
        self._indexed: dict[str, str] = {}
        if has_single:
            return [SINGLE]
        if has_index:
            self._indexed = _weight_map(self.path)
            return sorted(set(self._indexed.values()))
        pickles = sorted(path.name for path in self.path.glob("*.bin"))
        raise ConfigError(
            f"{self.path} holds no safetensors weights; got {', '.join(pickles[:3]) or 'no weights at all'}. Needed: "
            f"{SINGLE}, or {INDEX} with its shards. "
            + (
                "Convert it: load it in transformers and save_pretrained(..., safe_serialization=True)."
                if pickles
                else "Name the directory that holds the model."
            )
        )

    def _place(self, name: str, shard: str) -> None:
        if name in self.shard_of:
            raise ConfigError(
                f"{self.path}: {name} is stored twice, in {self.shard_of[name]} and in {shard}. A tensor has one "
                "shard. Remove the shard that is out of date, or save the checkpoint again."
            )
        self.shard_of[name] = shard

    def _check_index(self) -> None:
        """An index and its shards must say the same: a tensor that only one of them knows is a lost tensor."""
        if not self._indexed:
            return
        wrong = sorted(name for name, shard in self._indexed.items() if self.shard_of.get(name) != shard)
        unlisted = sorted(self.shard_of.keys() - self._indexed.keys())
        if wrong or unlisted:
            fault = (
                f"lists {wrong[0]} in {self._indexed[wrong[0]]}, which lacks it ({len(wrong)} such tensors)"
                if wrong
                else f"does not list {unlisted[0]} of {self.shard_of[unlisted[0]]} ({len(unlisted)} such tensors)"
            )
            raise ConfigError(
                f"{self.path / INDEX} {fault}. Index and shards must name the same tensors. Download the checkpoint "
                "again, or save it again."
            )

    def _aliases(self) -> dict[str, str]:
        named = (item for reader in self._shards.values() for item in reader.metadata.items())
        return {alias: kept for alias, kept in named if kept in self.specs and alias not in self.specs}


def _is_carried(name: str, pattern: str) -> bool:
    # a glob's star crosses slashes: files in folders are carried only by a pattern that names the folder
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _shard(path: Path, name: str) -> ContainerReader:
    if not (path / name).is_file():
        raise ConfigError(
            f"{path} lacks the shard {name} that {INDEX} lists. Every shard must be there. Download the rest of the "
            "checkpoint."
        )
    return ContainerReader(path / name)


def _weight_map(path: Path) -> dict[str, str]:
    """The index's tensor -> shard. Raises: FormatError unless every shard is a plain file name."""
    found = _read_json(path, INDEX).get("weight_map")
    shards = list(found.values()) if isinstance(found, dict) else []
    odd = [shard for shard in shards if not isinstance(shard, str) or Path(shard).name != shard]
    if not isinstance(found, dict) or not shards or odd:
        raise FormatError(
            f"{path / INDEX} holds no usable weight_map; got {odd[0] if odd else found!r}. It maps tensor names to "
            "file names in the same directory. Download it again, or save the checkpoint again."
        )
    return found


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not (path / name).is_file():
        raise ConfigError(
            f"{path} holds no {name}. A checkpoint is a directory with {CONFIG} and safetensors files. Name the "
            "directory of a whole checkpoint."
        )
    try:
        content = json.loads((path / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path / name} is not JSON ({error}). It must hold one JSON object. Download it again, or save the "
            "checkpoint again."
        ) from error
    if not isinstance(content, dict):
        raise FormatError(
            f"{path / name} holds a JSON {type(content).__name__}. It must hold one JSON object. Download it again, "
            "or save the checkpoint again."
        )
    return content
