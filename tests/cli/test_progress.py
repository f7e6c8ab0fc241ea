"""Progress lines and tables, as a person sees them."""

from tracefp4.cli.plan_tables import ranges
from tracefp4.cli.progress import DemoPrinter, StepPrinter, print_table
from tracefp4.diagnostics.report import Table


def test_one_line_per_step(capsys):
    show = StepPrinter(total=20)
    show({"step": 0, "reward_mean": 0.25, "mismatch/abs_mean": 0.00123})
    show({"step": 1})
    first, second = capsys.readouterr().out.splitlines()
    assert "1/20" in first and "0.250" in first and "0.0012" in first
    assert "2/20" in second and "-" in second


def test_a_step_without_anything_to_train_on_says_why(capsys):
    # Mutation: a hint at some skipped groups, or at none of none.
    show = StepPrinter(total=3)
    show({"step": 0, "reward_mean": 0.0, "groups": 2.0, "groups_skipped": 2.0})
    show({"step": 1, "reward_mean": 0.5, "groups": 2.0, "groups_skipped": 1.0})
    show({"step": 2, "groups": 0.0, "groups_skipped": 0.0})
    hints = ["equal within every group" in line for line in capsys.readouterr().out.splitlines()]
    assert hints == [True, False, False]


def test_demo_events_carry_the_time(capsys):
    DemoPrinter()("warm start")
    out = capsys.readouterr().out
    assert out.endswith("warm start\n") and " s]" in out


def test_tables_keep_brackets_and_show_captions(capsys):
    print_table(
        Table(title="t [x]", header=("name", "n"), rows=(("a[b]", "1"), ("c", "22")), caption="why [y]")
    )
    out = capsys.readouterr().out
    assert "t [x]" in out and "a[b]" in out and "why [y]" in out
    print_table(Table(title="empty", header=("name",), rows=()))
    assert "empty" in capsys.readouterr().out


def test_ranges_are_short():
    assert ranges([]) == "-"
    assert ranges([4]) == "4"
    assert ranges(range(40)) == "0-39"
    assert ranges([3, 7, 11]) == "3, 7, 11"
    assert ranges(range(3, 40, 4)) == "3, 7, ..., 39"
    assert ranges([0, 1, 2, 4, 5]) == "5 of 0-5"
