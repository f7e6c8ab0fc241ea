"""Where prompts come from: reasoning-gym's generators or a JSONL file, each item reproducible from its index
alone.

A source is a pure function index -> Task, so the state of the data is one number, the next index, and a
resumed run sees the items that the stopped run had not seen. It never scores (see rewards) and never batches.

reasoning-gym seeds item i with `seed + i`. Two consequences: runs that should see different data need seeds
far apart (seed 0 and seed 1 share all items but one, shifted), and the held-out split is the same generator
with the seed moved by HELD_OUT_OFFSET, disjoint in seeds as long as training stays below that index, which
`item` enforces. Two seeds may still generate the same text where a task has few different items;
a run's `TaskStream` passes over what its evaluation asks (`held_out`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tracefp4.errors import ConfigError

HELD_OUT_OFFSET = 1_000_000_000
# how many held-out questions in a row a stream passes over, before the task counts as too small
MOST_PASSED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One question and what is needed to score an answer to it."""

    source: str
    """reasoning-gym dataset name, or the JSONL file's path."""
    index: int
    """Index of the item in its source, >= 0."""
    prompt: str
    """The question as plain text; for `messages`, the content of the last one."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """Chat messages (role, content). None: the task is plain text."""
    answer: str = ""
    """The expected answer as text."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """The item as its source gave it; verifiers read its metadata."""
    source_config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reasoning-gym dataset; empty for JSONL."""


class TaskSource(Protocol):
    """Items by index."""

    @property
    def digest(self) -> str:
        """16 hex digits that change when any item could change."""
        ...

    def item(self, index: int) -> Task:
        """Return item `index` (>= 0); the same one on every call and in every process."""
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of a text."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the conversation as one string."""
        ...


class ReasoningGymTasks:
    """Items of one reasoning-gym dataset: item i is generated from seed + i and the options."""

    def __init__(self, name: str, *, seed: int, config: Mapping[str, Any] | None = None) -> None:
        """Create the generator.

        Args:
            name: registered dataset name, e.g. "chain_sum".
            seed: >= 0; two runs with seeds closer than their number of items share items.
            config: options of the dataset (`seed` is not among them).

        Raises:
            ConfigError: reasoning-gym is not installed, an unknown dataset (with the nearest names) or
                option.
        """
        if seed < 0:
            raise ConfigError(f"ReasoningGymTasks needs a seed >= 0; got {seed}. Use for example 0.")
        self.name, self.seed, self.config = name, seed, dict(config or {})
        if "seed" in self.config:
            raise ConfigError(
                f"ReasoningGymTasks takes the seed as an argument; got it in config: {self.config}. "
                "Remove it from the options."
            )
        self.dataset = create_dataset(name, seed=seed, config=self.config)

    @property
    def digest(self) -> str:
        """16 hex digits of name, seed and options."""
        return _digest({"name": self.name, "seed": self.seed, "config": self.config})

    def item(self, index: int) -> Task:
        """Generate item `index`.

        Raises:
            ConfigError: an index outside [0, HELD_OUT_OFFSET), where it would run into the held-out split, or
                beyond a dataset that generates all its items in advance.
        """
        if not 0 <= index < HELD_OUT_OFFSET:
            raise ConfigError(
                f"ReasoningGymTasks needs an index in [0, {HELD_OUT_OFFSET}); got {index}. "
                "Larger ones belong to the held-out split; choose another seed."
            )
        try:
            entry = self.dataset[index]
        except IndexError as error:
            raise ConfigError(
                f"Dataset {self.name!r} has no item {index}; it generates a fixed number in advance. "
                "Raise 'size' in its options."
            ) from error
        return Task(
            source=self.name,
            index=index,
            prompt=entry["question"],
            answer=str(entry["answer"]),
            entry=entry,
            source_config=self.config,
        )

    def held_out(self) -> ReasoningGymTasks:
        """Return the split for evaluation: the same generator, seed moved by HELD_OUT_OFFSET."""
        if self.seed >= HELD_OUT_OFFSET:
            raise ConfigError(
                f"held_out needs a training seed below {HELD_OUT_OFFSET}; got {self.seed}. "
                "Call it on the training split, or choose a smaller seed."
            )
        return ReasoningGymTasks(self.name, seed=self.seed + HELD_OUT_OFFSET, config=self.config)


class JsonlTasks:
    """Items of a JSONL file: every line an object with `prompt` or `messages`, and `answer`.

    Index i is line order[i mod n] of epoch i div n; with a shuffle seed each epoch has its own order.
    """

    def __init__(self, path: str | Path, *, shuffle_seed: int | None = None) -> None:
        """Read and check the whole file; blank lines are skipped.

        Raises:
            ConfigError: a file that is missing or empty, or a malformed line, as file:line.
        """
        self.path, self.shuffle_seed = Path(path), shuffle_seed
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"Task file {str(path)!r} cannot be read: {error}. Give a UTF-8 JSONL file."
            ) from error
        self.rows = [
            _parse_line(line, where=f"{path}:{number}")
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
        if not self.rows:
            raise ConfigError(
                f"Task file {str(path)!r} has no tasks; at least one line is needed. "
                'Write one object per line: {"prompt": ..., "answer": ...}.'
            )
        self._content = hashlib.sha256(text.encode()).hexdigest()
        self._epoch, self._order = -1, list(range(len(self.rows)))

    @property
    def digest(self) -> str:
        """16 hex digits of the file's content and the shuffle seed."""
        return _digest({"content": self._content, "shuffle_seed": self.shuffle_seed})

    def item(self, index: int) -> Task:
        """Return item `index`, >= 0; the file repeats.

        Raises:
            ConfigError: a negative index.
        """
        if index < 0:
            raise ConfigError(f"JsonlTasks needs an index >= 0; got {index}. Count items from 0.")
        epoch, place = divmod(index, len(self.rows))
        if self.shuffle_seed is not None and epoch != self._epoch:
            self._order = list(range(len(self.rows)))
            random.Random(f"{self.shuffle_seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        row = self.rows[self._order[place]]
        messages = tuple(row["messages"]) if "messages" in row else None
        prompt = row["prompt"] if messages is None else messages[-1]["content"]
        return Task(
            source=str(self.path),
            index=index,
            prompt=prompt,
            messages=messages,
            answer=str(row["answer"]),
            entry=row,
        )


class TaskStream:
    """A source with a cursor, the data state of a run."""

    def __init__(
        self, source: TaskSource, *, next_index: int = 0, excluded: Collection[str] = frozenset()
    ) -> None:
        """Start at `next_index`, >= 0; items whose prompt is among `excluded` are passed over."""
        self.source, self.next_index, self.excluded = source, next_index, frozenset(excluded)

    def take(self, count: int) -> list[Task]:
        """Return the next `count` items that are not excluded, and move behind them.

        Raises:
            ConfigError: no such item among MOST_PASSED in a row.
        """
        return [self._next() for _ in range(count)]

    def _next(self) -> Task:
        for _ in range(MOST_PASSED):
            task = self.source.item(self.next_index)
            self.next_index += 1
            if task.prompt not in self.excluded:
                return task
        raise ConfigError(
            f"training items: {MOST_PASSED} in a row ask a question that is held out for evaluation "
            f"({len(self.excluded)} are). Reserve fewer with run.eval_items, or widen task.options."
        )

    def state(self) -> dict[str, int | str]:
        """Return what a checkpoint keeps: the next index and the source's digest."""
        return {"next_index": self.next_index, "source": self.source.digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continue from `state`.

        Raises:
            ConfigError: the state belongs to another source.
        """
        if state["source"] != self.source.digest:
            raise ConfigError(
                f"Data state belongs to source {state['source']}; this run's source is "
                f"{self.source.digest}. Resume with the same data section, or start a new run."
            )
        self.next_index = int(state["next_index"])


def create_dataset(name: str, *, seed: int, config: Mapping[str, Any]) -> Any:
    """Create a reasoning-gym dataset, with errors that name what was wrong.

    Raises:
        ConfigError: reasoning-gym is not installed, an unknown dataset or option, or a refused value.
    """
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ConfigError(
            f"Dataset {name!r} needs the reasoning-gym package, which is not installed. "
            "Install it with: pip install reasoning-gym."
        ) from error
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=3)
        hint = (
            f"Did you mean {', '.join(map(repr, near))}?" if near else "See reasoning_gym.factory.DATASETS."
        )
        raise ConfigError(
            f"Unknown reasoning-gym dataset {name!r}; {len(factory.DATASETS)} are registered. {hint}"
        )
    try:
        return factory.create_dataset(name, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        allowed = ", ".join(key for key in factory.DATASETS[name][1].__dataclass_fields__ if key != "seed")
        raise ConfigError(
            f"Dataset {name!r} refuses its options {dict(config)}: {error}. Allowed are {allowed}. "
            "Change the data section."
        ) from error


def encode_prompt(
    task: Task, *, tokenizer: Tokenizer, system_prompt: str = "", uses_chat_template: bool = False
) -> list[int]:
    """Tokenize a task once; these ids are what engine and trainer both see.

    Plain: system prompt and question as one text. Chat: the template's rendering of (system, question or
    messages) up to the start of the assistant's turn, without adding special tokens a second time.

    Args:
        task: the task.
        tokenizer: a transformers tokenizer, or anything with the same two methods.
        system_prompt: put before the question; "" for none.
        uses_chat_template: True renders through the chat template; needed for tasks with messages.

    Raises:
        ConfigError: messages without a chat template, or a prompt of no tokens.
    """
    if (uses_chat_template or task.messages is not None) and getattr(
        tokenizer, "chat_template", None
    ) is None:
        raise ConfigError(
            f"Task {task.index} of {task.source!r} needs a chat template; the tokenizer has none. "
            "Use a chat model's tokenizer, or 'prompt' in place of 'messages'."
        )
    if uses_chat_template or task.messages is not None:
        messages = list(task.messages or ({"role": "user", "content": task.prompt},))
        if system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(system_prompt + task.prompt)
    if not ids:
        raise ConfigError(
            f"Task {task.index} of {task.source!r} has an empty prompt; at least one token is needed. "
            "Give it some text."
        )
    return list(ids)


def _parse_line(line: str, *, where: str) -> dict[str, Any]:
    """One line as a checked dictionary."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not JSON ({error}); got {line[:60]!r}. Write one object per line."
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where} is a JSON {type(row).__name__}; an object is needed. "
            'Write {"prompt": ..., "answer": ...}.'
        )
    if ("prompt" in row) == ("messages" in row):
        raise ConfigError(
            f"{where} has the fields {sorted(row)}; exactly one of 'prompt' and 'messages' is needed. "
            "Add or remove one."
        )
    if not isinstance(row.get("answer"), str | int | float):
        raise ConfigError(
            f"{where} has the answer {row.get('answer')!r}; text or a number is needed. Add 'answer'."
        )
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise ConfigError(
            f"{where} has a prompt of type {type(row['prompt']).__name__}; text is needed. Quote it."
        )
    if "messages" in row:
        messages = row["messages"]
        is_chat = (
            isinstance(messages, list)
            and bool(messages)
            and all(
                isinstance(message, dict)
                and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str)
                for message in messages
            )
        )
        if not is_chat:
            raise ConfigError(
                f"{where} has malformed messages; a non-empty list of objects with text 'role' and "
                "'content' is needed. Rewrite the line."
            )
    return row


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
