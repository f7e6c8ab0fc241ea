"""Texts to calibrate on: a .txt or .jsonl file becomes token sequences of one length.

Documents are joined end to end with the tokenizer's end-of-sequence token between them and cut into sequences, so no
token is padding and none is lost but those beyond the limit. A .txt file is one document. A line of a .jsonl file is
one document: its `text`, its chat `messages` through the tokenizer's template, or its `prompt`. Never runs a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import ConfigError

FIELDS = ("text", "messages", "prompt")
"""What a line may hold; the first that is there is taken."""


def read_documents(path: str | Path) -> Iterator[str | list[dict[str, str]]]:
    """Yield the documents of a file: strings, or chat messages.

    Raises:
        ConfigError: no such file, another suffix, or a line that is no document.
    """
    file = Path(path)
    if not file.is_file() or file.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"{file} is not a .txt or .jsonl file. Texts are plain text, or one JSON object a line with "
            f"{', '.join(FIELDS)}. Name such a file."
        )
    with open(file, encoding="utf-8") as lines:
        if file.suffix == ".txt":
            yield lines.read()
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _document(line, where=f"{file}:{number}")


def _document(line: str, *, where: str) -> str | list[dict[str, str]]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    found = next((row[name] for name in FIELDS if name in row), None) if isinstance(row, dict) else None
    is_chat = isinstance(found, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in found
    )
    if not isinstance(found, str) and not (is_chat and found):
        raise ConfigError(
            f"{where} is no document: {line.strip()[:60]!r}. A line is a JSON object with a string `text` or "
            "`prompt`, or a list `messages` of role and content. Correct the line or remove it."
        )
    return found


def token_sequences(
    path: str | Path, *, tokenizer: Any, max_tokens: int, sequence_length: int
) -> tuple[list[Tensor], str]:
    """Tokenize a file up to a number of tokens.

    Args:
        path: the file.
        tokenizer: of transformers.
        max_tokens: where to stop, >= 1.
        sequence_length: tokens of a sequence, >= 1; the last one may be shorter.

    Returns:
        (sequences, digest): int64 tensors [T], and the first 16 hexadecimal digits of the SHA-256 of all their ids.

    Raises:
        ConfigError: a file without a token, or as `read_documents`.
    """
    ids: list[int] = []
    for document in read_documents(path):
        if ids and tokenizer.eos_token_id is not None:
            ids.append(int(tokenizer.eos_token_id))
        ids += _token_ids(document, tokenizer)
        if len(ids) >= max_tokens:
            break
    if not ids:
        raise ConfigError(
            f"{path} holds no text. Calibration needs tokens, best a hundred thousand. Name another file."
        )
    tokens = torch.tensor(ids[:max_tokens], dtype=torch.int64)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
    return list(tokens.split(sequence_length)), digest


def _token_ids(document: str | list[dict[str, str]], tokenizer: Any) -> list[int]:
    if isinstance(document, str):
        return list(tokenizer(document)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "The texts hold chat messages, and the checkpoint's tokenizer has no chat template. Messages need one. Use "
            "lines with `text`."
        )
    text = tokenizer.apply_chat_template(document, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
