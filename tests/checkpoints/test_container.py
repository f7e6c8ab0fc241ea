"""The container: bit equal with the safetensors library in both directions, and bounded in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tracefp4.checkpoints.container import ContainerReader, ContainerWriter
from tracefp4.checkpoints.header import DTYPES, TensorSpec
from tracefp4.errors import FormatError

ROOT = Path(__file__).parents[2]
SHAPES = [(), (1,), (3, 5), (2, 3, 4), (0, 7), (5, 0)]
# The library's own torch writer has no name for E8M0, its reader does.
LIBRARY_WRITES = [name for name in DTYPES if name != "F8_E8M0"]


def _random(dtype, shape):
    """Random bytes: NaN payloads, negative zeros and all; booleans are 0 or 1."""
    size = TensorSpec("", dtype, shape).num_bytes
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def _same(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


def _tensors(names):
    return {f"{name}.{i}": _random(DTYPES[name], shape) for name in names for i, shape in enumerate(SHAPES)}


def _write(path, tensors, **options):
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    with ContainerWriter(path, specs, **options) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


def test_the_library_reads_what_we_write(tmp_path):
    tensors, path = _tensors(DTYPES), tmp_path / "x.safetensors"
    _write(path, tensors, metadata={"format": "pt", "note": "\u00e9"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "\u00e9"}
        assert set(file.keys()) == set(tensors)
        for name, value in tensors.items():
            assert _same(file.get_tensor(name), value), name
    known = {name: value for name, value in tensors.items() if not name.startswith("F8_E8M0")}
    _write(tmp_path / "known", known)
    for name, value in load_file(tmp_path / "known").items():
        assert _same(value, known[name]), name


def test_we_read_what_the_library_writes(tmp_path):
    tensors, path = _tensors(LIBRARY_WRITES), tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with ContainerReader(path) as reader:
        assert reader.metadata == {"format": "pt"}
        assert set(reader.specs) == set(tensors)
        for name, value in tensors.items():
            assert _same(reader.read(name), value), name


def test_both_write_the_same_bytes(tmp_path):
    # one element type, names in order: nothing is left to the writer's choice
    tensors = {f"t{i}": _random(torch.bfloat16, (3, i)) for i in range(5)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    _write(tmp_path / "ours", tensors, metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_rows_are_the_rows_of_the_whole(tmp_path):
    value = _random(torch.bfloat16, (6, 2, 5))
    save_file({"a": _random(torch.uint8, (3,)), "x": value}, tmp_path / "x")
    with ContainerReader(tmp_path / "x") as reader:
        for start in range(7):
            for stop in range(start, 7):
                assert _same(reader.read_rows("x", start, stop), value[start:stop])
        for start, stop in ((-1, 2), (3, 2), (0, 7)):
            with pytest.raises(FormatError, match=f"rows {start}:{stop}"):
                reader.read_rows("x", start, stop)
        with pytest.raises(FormatError, match="no tensor 'y'"):
            reader.read("y")


def test_what_is_read_belongs_to_the_caller(tmp_path):
    save_file({"x": torch.ones(4)}, tmp_path / "x")
    with ContainerReader(tmp_path / "x") as reader:
        reader.read("x").zero_()
        assert torch.equal(reader.read("x"), torch.ones(4))


def test_a_file_cut_after_opening_is_refused(tmp_path):
    save_file({"x": torch.ones(1000)}, tmp_path / "x")
    with ContainerReader(tmp_path / "x") as reader:
        with open(tmp_path / "x", "r+b") as file:
            file.truncate(2000)
        with pytest.raises(FormatError, match="inside a tensor"):
            reader.read("x")


def test_rows_and_views_are_written_like_whole_tensors(tmp_path):
    value = _random(torch.float32, (6, 8))
    spec = TensorSpec("x", torch.float32, (8, 6))
    with ContainerWriter(tmp_path / "x", [spec]) as writer:
        for start, stop in ((0, 3), (3, 4), (4, 8)):
            writer.write_rows("x", start, value.t()[start:stop])
    assert _same(load_file(tmp_path / "x")["x"], value.t().contiguous())


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda w: w.write("y", torch.zeros(4, 2)), "no such tensor"),
        (lambda w: w.write("x", torch.zeros(4, 2, dtype=torch.float64)), "float64"),
        (lambda w: w.write("x", torch.zeros(2, 4)), r"\(2, 4\)"),
        (lambda w: [w.write("x", torch.zeros(4, 2)) for _ in range(2)], "once"),
        (lambda w: w.write_rows("x", 1, torch.zeros(2, 2)), "row 0 next, not 1"),
        (lambda w: [w.write_rows("x", 0, torch.zeros(2, 2)) for _ in range(2)], "row 2 next, not 0"),
        (lambda w: w.write_rows("x", 0, torch.zeros(5, 2)), "rows of it"),
        (lambda w: w.write_rows("x", 0, torch.zeros(2, 3)), "rows of it"),
        (lambda w: [w.write_rows("x", 0, torch.zeros(2, 2)), w.write("x", torch.zeros(4, 2))], "once"),
        (lambda w: w.write_rows("x", 0, torch.zeros(2, 2)), "1 planned tensors are missing, x"),
        (lambda w: None, "1 planned tensors are missing, x"),
    ],
    ids=[
        "name", "dtype", "shape", "twice", "gap", "rows_twice", "too_many", "width", "rows_then_whole", "rows_missing",
        "missing",
    ],
)  # fmt: skip
def test_what_was_not_planned_is_refused_and_leaves_no_file(write, message, tmp_path):
    with (
        pytest.raises(FormatError, match=message),
        ContainerWriter(tmp_path / "x", [TensorSpec("x", torch.float32, (4, 2))]) as writer,
    ):
        write(writer)
    assert list(tmp_path.iterdir()) == []


def test_an_unclosed_file_is_no_container(tmp_path):
    writer = ContainerWriter(tmp_path / "x", [TensorSpec("x", torch.float32, (4,))])
    writer.write("x", torch.ones(4))
    with pytest.raises(FormatError):
        ContainerReader(tmp_path / "x")
    writer.close()
    assert torch.equal(load_file(tmp_path / "x")["x"], torch.ones(4))


def test_an_existing_file_is_never_overwritten(tmp_path):
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        ContainerWriter(tmp_path / "x", [TensorSpec("x", torch.float32, (4,))])
    assert (tmp_path / "x").read_bytes() == b"mine"


MEMORY = """
import sys, torch
from tracefp4.checkpoints import ContainerReader, ContainerWriter, TensorSpec
def field(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) / 1024
def visit(path, rows):
    specs = [TensorSpec(f"t{i}", torch.bfloat16, (rows, 8192)) for i in range(6)]
    with ContainerWriter(path, specs) as writer:
        for i, spec in enumerate(specs):
            writer.write(spec.name, torch.full(spec.shape, i, dtype=spec.dtype))
    with ContainerReader(path) as reader:
        for i, spec in enumerate(specs):
            assert reader.read(spec.name)[rows - 1, 8191] == i
visit(sys.argv[1] + ".warm", 1)  # what torch loads on first use
before = field("VmHWM")
visit(sys.argv[1], 2560)
print(field("VmHWM") - before)
"""
# One tensor of 40 MiB is alive at a time, and a second while it is replaced; allocators round up. (Blocks beyond
# 32 MiB, so that freeing one gives it back to the system.)
MAX_GROWTH_MIB = 2 * 40 + 8


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_is_bounded_by_a_tensor_not_by_the_file(tmp_path):
    """240 MiB in 6 tensors pass through; mapping the file would leave all of it resident."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "x")], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert float(result.stdout) < MAX_GROWTH_MIB
