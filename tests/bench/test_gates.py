"""Gates: how a figure is judged, what the table holds, and what `bench gates` says of stored results."""

import json
from dataclasses import replace

import pytest
from tests.bench.test_row import row
from typer.testing import CliRunner

from tracefp4.bench import cpu, gate_table
from tracefp4.bench.gate_table import GATES, SUITES, gates_of, is_missed
from tracefp4.bench.gates import Gate, at_least, at_most, figure_of, shown
from tracefp4.bench.results import GUIDANCE_ROW, read_results, write_rows
from tracefp4.bench.row import Check, Machine
from tracefp4.cli.main import app
from tracefp4.errors import ConfigError


def gate(bound, aim=None):
    return Gate(row="cpu.x", text="claim", gate=bound, aim=aim)


@pytest.mark.parametrize(
    ("bound", "aim", "changes", "met"),
    [
        (at_least(10, "ratio"), None, {}, "gate"),  # exactly on the gate
        (at_least(10.1, "ratio"), None, {}, "no"),
        (at_least(10, "ratio"), at_least(100), {}, "ambition"),
        (at_least(10.1, "ratio"), at_least(100), {}, "no"),  # an ambition does not excuse a missed gate
        (at_least(10, "ratio"), at_least(101), {}, "gate"),
        (None, at_least(100), {}, "ambition"),
        (None, at_least(101), {}, "not judged"),
        (
            at_least(10, "ratio"),
            None,
            {"peer_value": None},
            "not judged",
        ),  # a peer that did not run proves nothing
        (at_least(10, "ratio"), at_least(1), {"peer_value": None}, "not judged"),
        (at_least(0.1, "share"), None, {}, "gate"),
        (at_least(0.11, "share"), None, {}, "no"),
        (at_most(0.5, "cost"), None, {"value": 5.0, "better": "less"}, "gate"),
        (at_most(0.5, "cost"), None, {"value": 5.1, "better": "less"}, "no"),
        (at_most(-5, "excess"), at_most(-6, "excess"), {"value": 5.0, "better": "less"}, "gate"),
        (at_most(100), None, {}, "gate"),
        (at_most(99), None, {}, "no"),
        (at_least(0), None, {"value": float("nan")}, "no"),
        (at_least(10, "ratio"), None, {"check": Check(error=1, allowed=0, text="bytes")}, "no"),
        (at_least(10, "ratio"), None, {"check": Check(error=0, allowed=0, text="bytes")}, "gate"),
    ],
)
def test_verdicts(bound, aim, changes, met):
    assert gate(bound, aim).met(row(**changes)) == met


def test_bounds_and_figures_are_read_by_people():
    assert str(at_least(0.8, "share")) == ">= 80%" and str(at_most(1.3, "cost")) == "<= 1.3x"
    assert (
        str(at_least(9000, unit="tokens/s")) == ">= 9,000 tokens/s"
        and str(at_most(2, "excess", "us")) == "<= 2 us"
    )
    assert shown(3.14159, "ratio") == "3.14x" and shown(151.6, "value", "ms") == "152 ms"
    assert figure_of(row(value=30.0), "cost") == 3.0


def test_the_table_is_whole():
    assert {g.suite for g in GATES} == set(SUITES) and all(g.gate or g.aim for g in GATES)
    keys = [(g.row, g.gate.figure if g.gate else None) for g in GATES]
    assert len(keys) == len(set(keys))
    # an aim lies beyond its gate
    for g in GATES:
        if g.gate and g.aim and g.aim.figure == g.gate.figure:
            further = g.aim.number - g.gate.number
            assert g.aim.is_least == g.gate.is_least and (further > 0) == g.gate.is_least, g.row
    rows = {g.row for g in GATES}
    assert "engine.qwen3-30b-a3b.8k" in rows and "trainer.qwen3-30b-a3b.4_layers.32k" in rows


def test_every_gate_of_the_processor_is_measured(monkeypatch):
    monkeypatch.setattr("tracefp4.bench.clock.LEAST_ROUND_S", 0.0)
    measured = {found.id for found in cpu.run_cpu(rows=8, width=64, rounds=1)}
    gated = {g.row for g in GATES if g.suite == "cpu"}
    assert len(gated) == 10 and gated - measured == set()


def test_a_gate_for_one_gpu_judges_no_other():
    name = "kernels.refit.qwen3-30b-a3b"
    machine = Machine(hardware="NVIDIA H200, sm_90", versions={}, commit="c", date="2026-01-01")
    slow = row(id=name, value=151.0, unit="ms", better="less", machine=machine)
    assert [g.met(slow) for g in gates_of(slow)] == ["no"] and is_missed(slow)
    assert not is_missed(replace(slow, value=150.0))
    elsewhere = replace(slow, machine=replace(machine, hardware="NVIDIA L4, sm_89"))
    assert gates_of(elsewhere) == [] and not is_missed(elsewhere)
    wrong = replace(elsewhere, check=Check(error=1, allowed=0, text="bytes"))
    assert is_missed(wrong)


@pytest.fixture
def table(monkeypatch):
    """Three gates in place of all."""
    found = (
        Gate(row="cpu.x", text="fast", gate=at_least(10, "ratio"), aim=at_least(200, unit="Melem/s")),
        Gate(row="engine.y", text="faster", gate=at_least(9000, unit="tokens/s"), hardware="H200"),
        Gate(row="cpu.z", text="aimed at", gate=None, aim=at_least(1)),
    )
    monkeypatch.setattr(gate_table, "GATES", found)
    return found


def on(date, hardware="H200", **changes):
    machine = Machine(hardware=hardware, versions={}, commit=f"of {date}", date=f"{date}T00:00:00+00:00")
    return row(machine=machine, **changes)


def run(folder, *options):
    return CliRunner().invoke(app, ["bench", "gates", "--results", str(folder), *options])


def judged(folder):
    result = run(folder, "--json")
    return result.exit_code, {line["row"]: line for line in json.loads(result.stdout)["gates"]}


def test_a_gate_without_a_result_does_not_hold(table, tmp_path):
    write_rows(tmp_path / "cpu.json", [on("2026-01-01")], suite="cpu")
    code, lines = judged(tmp_path)
    assert code == 1 and lines["cpu.x"]["met"] == "gate" and lines["cpu.x"]["figure"] == "10x"
    assert lines["engine.y"]["met"] == "no result" and lines["engine.y"]["source"] is None
    assert "cpu.json" in lines["cpu.x"]["source"] and "of 2026-01-01" in lines["cpu.x"]["source"]
    text = run(tmp_path).output
    assert "1 of 2 gates hold" in text and "no result" in text and ">= 9,000 tokens/s" in text


def test_the_newest_row_counts_and_only_on_its_hardware(table, tmp_path):
    fast, slow = on("2026-01-03", value=200.0), on("2026-01-02", value=1.0)
    write_rows(tmp_path / "b.json", [slow, on("2026-01-01", id="engine.y", value=9500.0)], suite="cpu")
    write_rows(tmp_path / "a.json", [fast], suite="cpu")
    write_rows(
        tmp_path / "c.json", [on("2026-02-01", hardware="L4", id="engine.y", value=1.0)], suite="engine"
    )
    code, lines = judged(tmp_path)
    assert code == 0 and lines["cpu.x"]["met"] == "ambition" and lines["engine.y"]["met"] == "gate"
    assert "2 of 2 gates hold" in run(tmp_path).output
    write_rows(tmp_path / "d.json", [on("2026-01-04", value=99.0)], suite="cpu")
    code, lines = judged(tmp_path)
    assert code == 1 and lines["cpu.x"]["met"] == "no" and "d.json" in lines["cpu.x"]["source"]


def test_a_wrong_result_is_no_figure(table, tmp_path):
    wrong = Check(error=3, allowed=0, text="bytes that differ from the reference")
    write_rows(tmp_path / "cpu.json", [on("2026-01-01", check=wrong)], suite="cpu")
    code, lines = judged(tmp_path)
    assert code == 1 and lines["cpu.x"]["met"] == "no"
    assert lines["cpu.x"]["figure"] == "wrong result: 3 bytes that differ from the reference"


def test_what_cannot_be_read_is_said(table, tmp_path):
    (tmp_path / "other.json").write_text('{"suite": "guidance_update", "steps": [1], "rows": [{}]}')
    assert "not read: " in run(tmp_path).output
    (tmp_path / "broken.json").write_text('{"suite": "cpu", "schema_version": 1, "rows": [{"id": "cpu.x"}]}')
    result = run(tmp_path)
    assert result.exit_code == 2 and "broken.json is no result of a suite" in result.output
    with pytest.raises(ConfigError, match="there is no folder"):
        read_results(tmp_path / "nothing")


def test_guidance_counts_with_its_fewest_bytes_at_the_floor(tmp_path):
    machine = {"hardware": "h", "versions": {}, "commit": "c", "date": "2026-01-01"}
    rows = [{"id": "secded", "activation_bytes": 2400, "mean": 0.1}]
    result = {
        "suite": "guidance",
        "best": "secded",
        "floor": 0.2,
        "size": "h200",
        "device": "cpu",
        "rows": rows,
    } | machine
    (tmp_path / "guidance.json").write_text(json.dumps(result))
    (found,) = read_results(tmp_path).rows
    assert found.row.id == GUIDANCE_ROW and found.row.value == 2400
    assert [g.met(found.row) for g in gates_of(found.row)] == ["gate"]
    (tmp_path / "guidance.json").write_text(json.dumps(result | {"best": None}))
    assert read_results(tmp_path).rows == []
