"""The calculator: exact results, nothing but arithmetic, one call per turn."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rl.worlds import tasks

from tracefp4.rl.calculator import INSTRUCTION, Calculator, calculate
from tracefp4.rl.environments import End, Reply, Turn


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3+4", "7"), (" 42 - 25 ", "17"), ("2*(3-5)", "-4"), ("-3", "-3"), ("+3--2", "5"), ("7/2", "3.5"),
        ("6/3", "2"), ("1/3", "0.333333"), ("0.1+0.2", "0.3"), ("2.50*2", "5"), ("0.1*3-0.3", "0"),
        ("99999999999999999999+1", "100000000000000000000"), ("9" * 31 + "*" + "9" * 31, str((10**31 - 1) ** 2)),
    ],
)  # fmt: skip
def test_results_are_exact(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "", "1/0", "1/(2-2)", "2**9", "2//3", "9**9**9", "(1", "1 2", "()", "1(2)", "1,2", "a", "__import__('os')",
        "1e9", "0x10", "1_000", "007", "1" * 65, "3%2", "1<2", "\n1+1\n2", "1..2",
    ],
)  # fmt: skip
def test_anything_else_is_an_error_for_the_policy(expression):
    assert calculate(expression) == "error"


@given(
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 999)), min_size=1, max_size=6),
    st.integers(0, 999),
)
def test_integers_agree_with_python(rest, first):
    text = str(first) + "".join(f"{sign}{number}" for sign, number in rest)
    assert calculate(text) == str(eval(text))


@given(st.text(alphabet="0123456789+-*/(). e_x", max_size=70))
def test_whatever_is_written_gives_a_number_or_an_error(text):
    found = calculate(text)
    assert found == "error" or Fraction(found) is not None


def turn(text):
    return Turn(index=0, token_ids=(1,), text=text, is_complete=True, is_last=False)


def test_a_turn_with_a_call_is_answered_and_one_without_ends():
    episode = Calculator().open(tasks("x")[0], seed=1)
    assert episode.answer(turn("so <tool>3+4</tool>")) == Reply(content="<result>7</result>", tool_calls=1)
    assert episode.answer(turn("<tool>x</tool>")) == Reply(content="<result>error</result>", tool_calls=1)
    for text in ("<answer>7</answer>", "<tool>3+4", "3+4</tool>", ""):
        assert episode.answer(turn(text)) == End()


def test_the_instruction_follows_the_question():
    (task,) = tasks("3 + 4 =")
    assert Calculator().prompt(task) == f"3 + 4 =\n{INSTRUCTION}"
    assert Calculator(instruction="").prompt(task) is None
