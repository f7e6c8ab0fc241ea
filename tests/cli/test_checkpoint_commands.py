"""quantize, export and import from the command line: what they print, their exit codes, and one whole way round."""

import json

import pytest
from tests.checkpoints.fp4 import files, save_wide, statistics_of
from typer.testing import CliRunner

from tracefp4.cli import main

runner = CliRunner()


def _run(*arguments):
    return runner.invoke(main.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny Qwen3 mixture."""
    save_wide("qwen3_moe", tmp_path / "m")
    return tmp_path / "m"


def test_the_way_round(checkpoint, tmp_path):
    made = _run("quantize", checkpoint, tmp_path / "q")
    assert made.exit_code == 0, made.output
    assert "Error of the weights" in made.stdout and "Worst modules" in made.stdout
    assert "24 linears in FP4, 12 as they were" in made.stdout
    plain = _run("import", tmp_path / "q", tmp_path / "p", "--dequantize")
    assert plain.exit_code == 0 and "layout plain" in plain.stdout
    back = _run("export", tmp_path / "p", tmp_path / "r")
    assert back.exit_code == 0 and "every byte as it was imported" in back.stdout
    assert files(tmp_path / "q") == files(tmp_path / "r")
    other = _run("import", tmp_path / "q", tmp_path / "o", "--layout", "modelopt", "--json")
    assert json.loads(other.stdout) == {"path": str(tmp_path / "o"), "layout": "modelopt"}
    direct = _run("export", tmp_path / "p", tmp_path / "d", "--layout", "modelopt", "--json")
    assert json.loads(direct.stdout) == {"path": str(tmp_path / "d")}
    assert files(tmp_path / "o") == files(tmp_path / "d")


def test_json_holds_the_error_of_every_module(checkpoint, tmp_path):
    made = _run(
        "quantize", checkpoint, tmp_path / "q", "--method", "4over6", "--exclude", "*.layers.0.*", "--json"
    )
    answer = json.loads(made.stdout)
    assert len(answer["modules"]) == 12 and answer["bytes_after"] < answer["bytes_before"]
    assert len(answer["kept"]) == 24 and "model.layers.0.mlp.gate" in answer["kept"]
    error = answer["modules"]["model.layers.1.mlp.experts.0.up_proj"]
    assert error["kind"] == "expert" and 0.05 < error["relative_error"] < 0.15
    stored = json.loads(files(tmp_path / "q")["tracefp4.json"])
    assert stored["weight"]["scheme"] == "NVFP4_TENSOR_POW2_4OVER6_MSE" and stored["method"] == "4over6"
    assert stored["modules"].keys() == answer["modules"].keys()


def test_calibration_is_used_and_named(checkpoint, tmp_path):
    statistics = statistics_of(checkpoint)
    statistics.write(tmp_path / "s.safetensors")
    made = _run(
        "quantize", checkpoint, tmp_path / "q", "--method", "h-scale", "--activations", "static", "--calibration",
        tmp_path / "s.safetensors",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    stored = json.loads(files(tmp_path / "q")["tracefp4.json"])
    assert (
        stored["calibration"] == statistics.digest and stored["activation"]["scheme"] == "NVFP4_STATIC_POW2"
    )


def test_shards_have_the_size_asked_for(checkpoint, tmp_path):
    assert _run("quantize", checkpoint, tmp_path / "q", "--max-shard-size", "8 kb").exit_code == 0
    shards = sorted((tmp_path / "q").glob("model-*.safetensors"))
    assert len(shards) > 2


def test_what_is_there_is_replaced_only_when_told(checkpoint, tmp_path):
    assert _run("quantize", checkpoint, tmp_path / "q").exit_code == 0
    again = _run("quantize", checkpoint, tmp_path / "q", "--layout", "modelopt")
    assert again.exit_code == 2 and "is not empty" in again.stderr
    assert _run("quantize", checkpoint, tmp_path / "q", "--layout", "modelopt", "--overwrite").exit_code == 0
    assert "hf_quant_config.json" in files(tmp_path / "q")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "M", "OUT", "--scheme", "NVFP4"), "Unknown scheme 'NVFP4'"),
        (("quantize", "M", "OUT", "--layout", "gguf"), "Unknown layout 'gguf'"),
        (("quantize", "M", "OUT", "--max-shard-size", "huge"), "'huge' is no size"),
        (("quantize", "M", "OUT", "--max-shard-size", "5"), "'5' is no size"),
        (("quantize", "M", "M", "--overwrite"), "is the checkpoint that is read"),
        (("quantize", "M", "OUT", "--max-shard-size", "0GB"), "'0GB' is no size"),
        (("quantize", "M", "OUT", "--activations", "static"), "tracefp4 calibrate"),
        (("quantize", "absent", "OUT"), "is not a directory"),
        (("import", "M", "OUT"), "got neither"),
        (("import", "M", "OUT", "--dequantize", "--layout", "modelopt"), "got both"),
        (("import", "M", "OUT", "--dequantize"), "is no FP4 checkpoint"),
        (("export", "M", "OUT"), "holds no whole checkpoint of a run"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_message_and_nothing_is_written(arguments, message, checkpoint, tmp_path):
    names = {"M": str(checkpoint), "OUT": str(tmp_path / "out")}
    result = _run(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert f"error: {result.stderr.partition('error: ')[2]}" in result.stderr and message in result.stderr
    assert "Traceback" not in result.output and not (tmp_path / "out").exists()


def test_an_import_has_its_input_scales(checkpoint, tmp_path):
    _run("quantize", checkpoint, tmp_path / "q")
    _run("import", tmp_path / "q", tmp_path / "p", "--dequantize")
    result = _run("export", tmp_path / "p", tmp_path / "r", "--activations", "static")
    assert result.exit_code == 2 and "its scales are reused as they are" in result.stderr


@pytest.mark.parametrize("command", ["quantize", "export", "import"])
def test_help_shows_examples_that_parse(command):
    text = _run(command, "--help").stdout
    assert text.count(f"tracefp4 {command} ") >= 2 and "Examples:" in text
