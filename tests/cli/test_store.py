"""`tracefp4 store check` names what is damaged and what nobody finished; `store serve` refuses what it cannot do."""

import json

import pytest
from typer.testing import CliRunner

from tracefp4.cli.main import app
from tracefp4.store import DirectoryWriter, Segment


@pytest.fixture
def path(tmp_path):
    """A store with two finished trajectories and one that is not."""
    with DirectoryWriter(tmp_path / "records") as writer:
        for name in ("a", "b", "open"):
            writer.append(
                Segment(trajectory=name, start=0, num_rows=4, columns={"x": name[:1].encode() * 40})
            )
        writer.finish("a")
        writer.finish("b")
    return tmp_path / "records"


def run(*arguments):
    found = CliRunner().invoke(app, ["store", *map(str, arguments)])
    return found.exit_code, found.output


def spoil(path):
    """Flip one bit of trajectory b's bytes on disk."""
    chunk = next(path.glob("*.chunk"))
    data = bytearray(chunk.read_bytes())
    data[data.index(b"b" * 40) + 15] ^= 4
    chunk.write_bytes(bytes(data))


def test_an_intact_store(path):
    code, output = run("check", path)
    assert code == 0
    assert output.splitlines()[0].startswith("2 trajectories finished, 1 not; 0.0 MiB")
    assert "not finished: open" in output and output.splitlines()[-1] == "intact"


def test_damage_is_named_and_is_the_exit_code(path):
    spoil(path)
    code, output = run("check", path)
    assert code == 1
    assert "lost: b column x rows 0..3, damaged" in output and output.splitlines()[-1] == "damaged"


def test_json_lists_everything(path):
    spoil(path)
    code, output = run("check", path, "--json")
    found = json.loads(output)
    assert (code, found["is_intact"], found["num_finished"], found["unfinished"]) == (1, False, 2, ["open"])
    assert found["lost"] == [{"trajectory": "b", "column": "x", "start": 0, "stop": 4, "reason": "damaged"}]


def test_a_lost_manifest_is_an_error_and_rebuilt_when_asked(path):
    (path / "manifest").unlink()
    code, output = run("check", path)
    assert code == 2 and "manifest" in output
    code, output = run("check", path, "--rebuild")
    assert code == 0 and "manifest written anew: 2 trajectories restored" in output


def test_long_lists_are_cut(tmp_path):
    with DirectoryWriter(tmp_path / "records") as writer:
        for i in range(30):
            writer.append(Segment(trajectory=f"t{i:02d}", start=0, num_rows=1, columns={"x": b"1"}))
    _, output = run("check", tmp_path / "records")
    assert (
        output.count("not finished: t") == 20 and "not finished: ... and 10 more (--json lists all)" in output
    )


def test_serve_refuses_an_unknown_policy_and_an_address(tmp_path):
    code, output = run("serve", tmp_path / "records", "--when-full", "hope")
    assert code == 2 and "--when-full: got 'hope'; allowed: wait, drop_trajectory" in output
    code, output = run("serve", tmp_path / "records", "--bind", "nowhere")
    assert code == 2 and "Address 'nowhere' refused" in output and "store key FILE" in output


def test_a_directory_that_is_no_store_is_refused_and_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    for arguments in (["check", tmp_path], ["check", tmp_path, "--rebuild"]):
        code, output = run(*arguments)
        assert code == 2 and "neither a file 'manifest' nor chunks" in " ".join(output.split())
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
