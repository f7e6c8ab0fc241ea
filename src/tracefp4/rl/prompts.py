"""From the recipe's [task] table to prompts as token ids, and to the verifier that scores completions."""

from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.held_out import DistinctTasks, prompts_of
from tracefp4.rl.rewards import RewardConfig, Scorer
from tracefp4.rl.tasks import JsonlTasks, ReasoningGymTasks, Task, TaskSource, TaskStream, encode_prompt


def build_source(task: TaskConfig) -> TaskSource:
    """Return the training items of a recipe."""
    if task.kind == "reasoning_gym":
        return ReasoningGymTasks(task.name, seed=task.seed, config=task.options)
    return JsonlTasks(task.path, shuffle_seed=task.seed)


def build_held_out(task: TaskConfig) -> TaskSource:
    """Return the items for evaluation: another seed of the generator, or the file named `eval_path`.

    Generated items have different prompts; item i is the same one however many are asked for. A file is taken
    as it is.

    Raises:
        ConfigError: a JSONL task without `eval_path`; evaluating on training items is not offered.
    """
    if task.kind == "reasoning_gym":
        return DistinctTasks(ReasoningGymTasks(task.name, seed=task.seed, config=task.options).held_out())
    if not task.eval_path:
        raise ConfigError(
            "task.eval_path: evaluation of a JSONL task needs a second file. Name one, or run.eval_items = 0."
        )
    return JsonlTasks(task.eval_path)


def build_stream(task: TaskConfig, *, reserved: int) -> TaskStream:
    """Return the training items with a cursor, without those that repeat a held-out question.

    Args:
        task: the recipe's table.
        reserved: the number of held-out items of the run, 0 without evaluation. A file is taken as it is.

    Raises:
        ConfigError: the task has fewer different questions.
    """
    source = build_source(task)
    if task.kind != "reasoning_gym" or reserved == 0:
        return TaskStream(source)
    return TaskStream(source, excluded=prompts_of(build_held_out(task), num_items=reserved))


def build_scorer(task: TaskConfig) -> Scorer:
    """Return the verifier: the task's own, math-verify, or a dotted function."""
    kinds = {
        "task": "reasoning_gym" if task.kind == "reasoning_gym" else "math_verify",
        "math_verify": "math_verify",
    }
    verifier = kinds.get(task.reward, "function")
    return Scorer(
        RewardConfig(
            verifier=verifier,
            function=task.reward if verifier == "function" else "",
            timeout_s=task.reward_timeout_s,
            isolation=task.reward_isolation,
            on_error=task.reward_on_error,
            answer_tag=task.answer_tag,
        )
    )


def encode(task: Task, *, tokenizer: Any) -> list[int]:
    """Tokenize one prompt: through the chat template when the tokenizer has one, else as plain text."""
    return encode_prompt(
        task, tokenizer=tokenizer, uses_chat_template=bool(getattr(tokenizer, "chat_template", None))
    )
