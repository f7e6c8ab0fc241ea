"""Exit codes, messages, and what the commands that need no model print."""

import inspect
import json
import warnings

import pytest
from typer.testing import CliRunner

from tracefp4.cli import main
from tracefp4.errors import RecordError

runner = CliRunner()


def _run(*arguments: str):
    return runner.invoke(main.app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", main.app.registered_commands, ids=lambda command: command.name)
def test_the_help_of_every_command_fits_eighty_columns(command):
    """Typer keeps the line breaks of a docstring; only its first paragraph is joined, and that not everywhere."""
    prose = inspect.cleandoc(command.callback.__doc__).partition("\b")[0]
    summary, *others = prose.split("\n\n")
    assert "\n" not in summary.strip()
    assert all(len(line) <= 78 for paragraph in others for line in paragraph.splitlines())


def test_plan_prints_the_promised_bytes():
    compact = _run("plan", "qwen3.5-35b-a3b", "--codec", "mantissa", "--layers", "last_half")
    assert compact.exit_code == 0, compact.output
    lines = [line.split() for line in compact.stdout.splitlines()]
    assert ["activations:", "codes", "and", "block", "scales", "7,680"] in lines
    assert ["KV:", "codes", "and", "block", "scales", "960"] in lines
    assert ["row", "exponents", "20"] in lines
    assert ["routed", "expert", "ids", "320"] in lines
    assert ["total", "8,980"] in lines
    full = _run("plan", "qwen3.5-35b-a3b", "--codec", "full", "--layers", "all").stdout
    assert "46,080" in full and "5,760" in full


def test_plan_groups_layers_unless_told_otherwise():
    grouped = _run("plan", "qwen3-30b-a3b").stdout
    assert "mlp.experts" in grouped and "0-47" in grouped
    named = _run("plan", "qwen3-30b-a3b", "--all-modules").stdout
    assert "model.layers.47.mlp.experts" in named


def test_plan_as_json():
    result = _run("plan", "qwen3-30b-a3b", "--card", "24GB", "--context", "1024", "--batch", "1", "--json")
    answer = json.loads(result.stdout)
    assert answer["fits"] == {
        "engine, BF16": False,
        "engine, FP4 plan": True,
        "trainer, all on one card": False,
    }
    assert answer["guidance_bytes_per_token"]["activations"] == 48 * (2048 // 64 * 19 + 2048 // 16) // 8
    experts = [m for m in answer["modules"] if m["name"] == "model.layers.3.mlp.experts"]
    assert experts[0]["is_quantized"] and experts[0]["guided"] == ["x"]
    caches = [m for m in answer["modules"] if m["kind"] == "kv"]
    assert len(caches) == 48 and caches[0]["guided"] == ["k", "v"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "gpt-4"), "neither a known model"),
        (("plan", "qwen3-30b-a3b", "--card", "tpu"), "unknown card 'tpu'"),
        (("plan", "qwen3-30b-a3b", "--codec", "half"), "error: --codec: unknown value 'half'"),
        (("plan", "qwen3-30b-a3b", "--layers", "first"), "error: --layers: unknown rule 'first'"),
        (("plan", "qwen3-30b-a3b", "--sites", "x,y"), "unknown value 'y'"),
        (("plan", "qwen3-30b-a3b", "--exclude", "mlp.experts"), "matches no module"),
        (("train", "absent.toml"), "cannot be read"),
        (("report", "absent"), "neither demo.json nor metrics.jsonl"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_any_of_our_errors_and_ctrl_c(monkeypatch):
    def fail(*args, **kwargs):
        raise RecordError("record: refused")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tracefp4.cli.config.load_config", fail)
    assert _run("train", "x.toml").exit_code == 2
    monkeypatch.setattr("tracefp4.cli.config.load_config", interrupt)
    interrupted = _run("train", "x.toml")
    assert interrupted.exit_code == 130
    assert "interrupted" in interrupted.stderr


def test_a_bug_is_not_hidden(monkeypatch):
    def crash(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("tracefp4.cli.config.load_config", crash)
    result = _run("train", "x.toml")
    assert result.exit_code == 1 and isinstance(result.exception, ZeroDivisionError)


def test_unknown_options_and_commands():
    assert _run("plan").exit_code == 2
    assert _run("fly").exit_code == 2
    assert _run("plan", "x", "--fast").exit_code == 2


def test_doctor_names_every_op_and_its_backend():
    findings = json.loads(_run("doctor", "--json").stdout)
    versions = {row["package"]: row["version"] for row in findings["versions"]}
    assert versions["torch"] != "not installed"
    assert {"cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "pyzmq"} <= set(versions)
    assert "triton" not in versions
    assert findings["devices"][0]["device"] == "cpu"
    ops = {row["op"] for row in findings["ops"]}
    assert {"quantize", "dequantize", "guided_quantize", "grouped_matmul", "kv_append", "kv_attention"} <= ops
    assert all(row["backend"] and row["reason"] for row in findings["ops"])
    assert "kv_attention" in _run("doctor").stdout


def test_report_says_where_it_wrote(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward_mean": 0.5}\n')
    result = _run("report", str(tmp_path), "--out", str(tmp_path / "a" / "r.html"))
    assert result.exit_code == 0
    assert (tmp_path / "a" / "r.html").is_file()
    assert "r.html" in result.stdout


def test_our_warnings_are_one_line_and_those_of_others_keep_their_place(monkeypatch, capsys):
    def warned():
        warnings.warn_explicit("scales were shared", UserWarning, main.__file__, 1)
        warnings.warn_explicit("old", UserWarning, "/elsewhere/library.py", 7)

    monkeypatch.setattr(main, "app", warned)
    others = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *warning: others.append(warning[2]))
        main.run()
    assert capsys.readouterr().err == "warning: scales were shared\n"
    assert others == ["/elsewhere/library.py"]
