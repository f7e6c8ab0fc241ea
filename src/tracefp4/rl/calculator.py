"""A calculator as environment: the policy writes <tool>3+4</tool> and reads <result>7</result>.

Exact arithmetic on decimal numbers with + - * / and parentheses. What the policy writes is parsed, never evaluated as a
program, and is short enough that no result can grow large. A turn without a call ends the trajectory, and the task's
verifier scores it.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from tracefp4.rl.environments import Content, End, Reply, Turn
from tracefp4.rl.tasks import Task

OPEN, CLOSE = "<tool>", "</tool>"
FAILED = "error"
INSTRUCTION = (
    "You may use a calculator: write <tool>3+4</tool> and the result follows as <result>7</result>. "
    "Give the answer as <answer>7</answer>."
)
# 64 characters hold at most 32 digits times 32 digits, or as many divisions: no result takes long
MAX_LENGTH = 64
_ALLOWED = re.compile(r"[0-9+\-*/(). ]+")
_CALL = re.compile(f"{OPEN}(.*?){CLOSE}", flags=re.DOTALL)


class Calculator:
    """The environment `calculator`."""

    def __init__(self, *, instruction: str = INSTRUCTION) -> None:
        """Keep the instruction.

        Args:
            instruction: follows the question on a line of its own; empty leaves the task as it stands.
        """
        self.instruction = instruction

    @property
    def stop(self) -> tuple[str, ...]:
        """A turn ends with a call."""
        return (CLOSE,)

    def prompt(self, task: Task) -> Content | None:
        """Return the question and the instruction, in the task's last message if it has messages."""
        if not self.instruction:
            return None
        text = f"{task.prompt}\n{self.instruction}"
        if task.messages is None:
            return text
        return [*task.messages[:-1], {**task.messages[-1], "content": text}]

    def open(self, task: Task, *, seed: int) -> CalculatorEpisode:
        """Begin an episode; it has no state and draws nothing."""
        return CalculatorEpisode()


class CalculatorEpisode:
    """Answers calls, one per turn."""

    def answer(self, turn: Turn) -> Reply | End:
        """Return the result of the turn's call, `error` for one that cannot be computed, or the end without a call."""
        found = _CALL.search(turn.text)
        if found is None:
            return End()
        return Reply(content=f"<result>{calculate(found.group(1))}</result>", tool_calls=1)

    def close(self) -> None:
        """Hold nothing."""


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text.

    Args:
        expression: decimal numbers, + - * / and parentheses, at most 64 characters.

    Returns:
        An integer exactly; another value rounded to six significant digits; `error` for anything else, division by
        zero included.
    """
    text = expression.strip()
    if len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text):
        return FAILED
    try:
        value = _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return FAILED
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        # the digits as written: a float literal would be rounded to binary
        return Fraction(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand, text)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError("only numbers, + - * / and parentheses")
