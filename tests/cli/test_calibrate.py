"""`tracefp4 calibrate`: a file that can be read, a table of what it holds, and refusals before any model is loaded."""

import json

import pytest
from tests.checkpoints.tiny_families import save_tiny
from typer.testing import CliRunner

from tracefp4.checkpoints import read_statistics
from tracefp4.cli import main
from tracefp4.rl.tiny import build_tokenizer

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate")
    save_tiny("qwen3_moe", path / "model", vocab_size=320)
    build_tokenizer(["3 + 4 = 7"]).save_pretrained(path / "model")
    lines = [{"text": f"{i} + {i} = {2 * i}"} for i in range(60)]
    chat = {"messages": [{"role": "user", "content": "1 + 1"}]}
    (path / "texts.jsonl").write_text("\n".join(map(json.dumps, [chat, *lines])), encoding="utf-8")
    return path


def run(*arguments):
    return runner.invoke(main.app, ["calibrate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_statistics_and_their_table(folder):
    out = folder / "s.safetensors"
    result = run(folder / "model", folder / "texts.jsonl", out, "--max-tokens", 120, "--sequence-length", 50)
    assert result.exit_code == 0, result.output
    found = read_statistics(out)
    assert found.num_tokens == 120
    assert found.digest in result.stdout and "120 tokens" in result.stdout
    num_few = sum(int(found.few(i).sum()) for i in found.layers)
    assert num_few > 0 and f"{num_few} of 8 experts saw fewer than 64 tokens" in result.stdout
    for i, (x, w2) in found.exponents().items():
        row = next(line.split() for line in result.stdout.splitlines() if line.split()[:1] == [str(i)])
        assert (row[6], row[8]) == (str(x), str(w2))


@pytest.mark.parametrize(
    ("model", "texts", "out", "message"),
    [
        ("none", "texts.jsonl", "s.safetensors", "is not a directory"),
        ("model", "texts.csv", "s.safetensors", "not a .txt or .jsonl file"),
        ("model", "texts.jsonl", "s.bin", "cannot be written"),
        ("model", "texts.jsonl", "none/s.safetensors", "cannot be written"),
    ],
)
def test_refusals(folder, model, texts, out, message):
    result = run(folder / model, folder / texts, folder / out)
    assert result.exit_code == main.EXIT_MISTAKE
    assert message in " ".join(result.stderr.split())
