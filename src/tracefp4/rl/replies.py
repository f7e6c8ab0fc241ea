"""From what an environment says to token ids: the first prompt, and what follows a turn of the policy.

Only the environment's content is encoded here. The sampled ids before it stay as they are; a chat template is rendered
around a placeholder in their place, and what it writes behind the placeholder is kept: the end of the policy's message,
the new messages and the head of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.environments import Content, Environment
from tracefp4.rl.prompts import encode
from tracefp4.rl.tasks import Task

# stands for the policy's message in the rendered chat; a text that no template writes
PLACEHOLDER = "[[policy-turn-6f1d]]"


def first_prompt(task: Task, *, tokenizer: Any, environment: Environment | None) -> list[int]:
    """Return the token ids that trajectories of a task begin with.

    Raises:
        RecordError: the environment's `prompt` failed, or gave nothing.
        ConfigError: as `prompts.encode`.
    """
    if environment is None:
        return encode(task, tokenizer=tokenizer)
    try:
        content = environment.prompt(task)
        messages, ids = ((), []) if content is None or isinstance(content, str) else _split(content)
    except ConfigError:
        raise
    # the boundary to foreign code: without a prompt there is nothing to sample, so the run ends, with the reason
    except Exception as error:
        raise RecordError(
            f"Environment prompt of task {task.index} of {task.source!r} failed: {type(error).__name__}: {error}. "
            "Allowed is text, token ids, messages or None. Repair `prompt`."
        ) from error
    if content is None:
        return encode(task, tokenizer=tokenizer)
    if isinstance(content, str):
        return encode(replace(task, prompt=content, messages=None), tokenizer=tokenizer)
    if messages:
        return encode(replace(task, prompt=messages[-1]["content"], messages=messages), tokenizer=tokenizer)
    if not ids:
        raise RecordError(
            f"Environment prompt of task {task.index} of {task.source!r} is empty; got {content!r}. At least one token "
            "is needed. Return None for the task as it stands."
        )
    return ids


def encode_reply(content: Content, *, tokenizer: Any, last_id: int) -> list[int]:
    """Return the token ids that follow a turn of the policy.

    Args:
        content: text and ids follow as they are. Messages come with what the chat template writes around them; the end
            mark of the policy's message is left out if `last_id` already is it.
        tokenizer: encodes; its vocabulary is the allowed range of ids.
        last_id: last token of the turn, sampled.

    Raises:
        ValueError: ids outside the vocabulary, or content of another kind.
        ConfigError: messages for a tokenizer without a chat template, or one that does not show the policy's message.
    """
    if isinstance(content, str):
        return list(tokenizer.encode(content, add_special_tokens=False))
    messages, ids = _split(content)
    if messages:
        return _encode_messages(messages, tokenizer=tokenizer, last_id=last_id)
    unknown = [token for token in ids if not 0 <= token < len(tokenizer)][:8]
    if unknown:
        raise ValueError(f"gave unknown token ids {unknown}, outside 0..{len(tokenizer) - 1}")
    return ids


def _encode_messages(messages: Sequence[Mapping[str, str]], *, tokenizer: Any, last_id: int) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"An environment's reply has {len(messages)} chat messages; the tokenizer has no chat template. Allowed "
            "then are text and token ids. Reply with text."
        )
    shown = [{"role": "user", "content": "-"}, {"role": "assistant", "content": PLACEHOLDER}, *messages]
    text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    if text.count(PLACEHOLDER) != 1:
        raise ConfigError(
            f"The chat template shows the policy's message {text.count(PLACEHOLDER)} times; allowed is once, or what "
            "follows it cannot be told apart. Reply with text in place of messages."
        )
    ids = list(tokenizer.encode(text.partition(PLACEHOLDER)[2], add_special_tokens=False))
    return ids[1:] if ids[:1] == [last_id] else ids


def _split(content: Sequence[Any]) -> tuple[tuple[Mapping[str, str], ...], list[int]]:
    """(messages, ids), one of them empty."""
    if all(isinstance(item, int) and not isinstance(item, bool) for item in content):
        return (), list(content)
    if all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in content):
        return tuple(content), []
    raise ValueError(f"gave {content!r}; text, token ids, or messages with role and content are needed")
