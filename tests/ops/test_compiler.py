"""Finding a compiler, keeping what it made, and saying why there is none."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tracefp4.errors import BackendError
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops import backend as backend_module
from tracefp4.ops import cache, compiler
from tracefp4.ops.backend import IMPLEMENTED, Backend, choose, explain
from tracefp4.ops.kernels import Library
from tracefp4.ops.quantize import quantize

ANSWER = (
    '__attribute__((visibility("default"))) long long answer(long long a, long long b) { return b - a; }\n'
)
WITH_KERNELS = [op for op, backends in IMPLEMENTED.items() if Backend.COMPILED in backends]
NO_COMPILER = "no C compiler found"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has neither looked for a compiler nor compiled anything, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend_module, "_LIBRARIES", {})
    for op in WITH_KERNELS:
        monkeypatch.setattr(import_module(f"tracefp4.ops.{op}.compiled").LIBRARY, "_status", None)
    for cached in (compiler._find, cache.cache_folder, cache._temporary_folder):
        cached.cache_clear()
    yield tmp_path
    for cached in (compiler._find, cache.cache_folder, cache._temporary_folder):
        cached.cache_clear()


@pytest.fixture
def source(fresh):
    path = fresh / "answer.c"
    path.write_text(ANSWER)
    return path


needs_compiler = pytest.mark.skipif(
    choose("quantize", "cpu") is not Backend.COMPILED, reason="needs a C compiler"
)


def library_of(path: Path, check=lambda: None) -> Library:
    return Library(path, {"answer": ""}, check)


@needs_compiler
def test_a_library_is_compiled_once_and_then_found(source, monkeypatch):
    built = compiler.load(source, ())
    assert built.functions.answer(2, 9) == 7
    assert built.made_by.startswith("compiled by ") and "-O3" in built.made_by
    [made] = (source.parent / "cache").rglob("*.so")
    monkeypatch.setattr(compiler, "_compiled", lambda *a: pytest.fail("compiled again"))
    assert compiler.load(source, ()).functions.answer(0, 5) == 5
    assert list((source.parent / "cache").rglob("compiling-*")) == []
    assert made.exists()


@needs_compiler
def test_another_source_header_or_flag_is_another_library(source, monkeypatch):
    header = source.with_name("numbers.h")
    header.write_text("")
    compiler.load(source, (header,))
    header.write_text("/* changed */")
    compiler.load(source, (header,))
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-g"))
    compiler.load(source, (header,))
    assert len(list((source.parent / "cache").rglob("*.so"))) == 3


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"not a library"], ids=["truncated", "garbage"])
def test_a_damaged_cache_file_is_compiled_again(source, damage):
    compiler.load(source, ())
    [made] = (source.parent / "cache").rglob("*.so")
    whole = made.read_bytes()
    made.unlink()  # the library is mapped: write a new file, not into the mapping
    made.write_bytes(damage or whole[:-1])
    assert compiler.load(source, ()).functions.answer(1, 2) == 1
    [again] = (source.parent / "cache").rglob("*.so")
    assert cache.digest_of(again) == again.stem


@needs_compiler
def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(source, monkeypatch):
    (source.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "file"))
    assert compiler.load(source, ()).functions.answer(1, 4) == 3
    assert cache.cache_folder() == Path(cache._temporary_folder().name)


@needs_compiler
def test_processes_that_compile_at_the_same_time_do_not_meet(source):
    code = (
        "import sys; from pathlib import Path; from tracefp4.ops import cache, compiler; "
        "print(compiler.load(Path(sys.argv[1]), ()).functions.answer(1, 43))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["42", "42"]
    assert [path.suffix for path in (source.parent / "cache").rglob("*") if path.is_file()] in (
        [".so"],
        [".so", ".so"],  # compilers that write a time stamp
    )


@needs_compiler
def test_flags_of_the_environment_cannot_relax_the_arithmetic(source, monkeypatch):
    # gcc links start-up code into such a library that makes the process flush subnormals to zero
    monkeypatch.setenv("CC", "cc -ffast-math")
    assert compiler.load(source, ()).functions.answer(1, 2) == 1
    assert (torch.tensor([2.0**-140]) * 2).item() == 2.0**-139


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_library_that_cannot_be_loaded_leaves_the_reference(source, monkeypatch):
    script = source.with_name("for another machine")
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo elsewhere-cc 1.0 && exit\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo elsewhere > "$2"; shift; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"'{script}'")
    with pytest.raises(BackendError, match=r"elsewhere-cc 1\.0 cannot compile answer\.c: error: .*Set CC to"):
        compiler.load(source, ())
    assert choose("quantize", "cpu") is Backend.REFERENCE


def test_a_cc_that_is_no_command_is_a_reason(fresh, monkeypatch):
    monkeypatch.setenv("CC", 'cc "')
    assert choose("quantize", "cpu") is Backend.REFERENCE
    with pytest.raises(BackendError, match=r"CC cannot be read as a command; got CC=cc \"\.* \(No closing"):
        choose("quantize", "cpu", Backend.COMPILED)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": "/nowhere"}, f"{NO_COMPILER} (looked for cc, gcc, clang on PATH, and $CC is not set)"),
        ({"CC": "/bin/false"}, f"{NO_COMPILER} (looked for CC=/bin/false)"),
        ({"CC": "no-such-compiler -m64"}, f"{NO_COMPILER} (looked for CC=no-such-compiler -m64)"),
    ],
    ids=["empty PATH", "CC fails", "CC is missing"],
)
def test_without_a_compiler_the_reference_runs_and_the_reason_is_given(fresh, monkeypatch, variables, reason):
    monkeypatch.delenv("CC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    from tracefp4.ops.quantize import compiled

    library = Library(compiled.LIBRARY._source, compiled.LIBRARY._signatures, lambda: None)
    monkeypatch.setattr(compiled, "LIBRARY", library)
    assert choose("quantize", "cpu") is Backend.REFERENCE
    row = next(row for row in explain() if row["op"] == "quantize")
    assert row["backend"] == "reference" and row["reason"].startswith(reason)
    assert quantize(torch.ones(1, 16), scheme=NVFP4_ROW_POW2).codes()[0, 0] == 7
    with pytest.raises(BackendError, match="cannot run COMPILED here: no C compiler found"):
        quantize(torch.ones(1, 16), scheme=NVFP4_ROW_POW2, backend=Backend.COMPILED)


@needs_compiler
def test_a_source_that_does_not_compile_is_a_reason(source):
    source.write_text("this is not C\n")
    status = library_of(source).status()
    assert not status.is_usable
    assert "cannot compile answer.c" in status.reason and "error" in status.reason


@needs_compiler
def test_a_library_that_differs_from_the_reference_is_refused(source):
    status = library_of(source, check=lambda: "packed codes").status()
    assert not status.is_usable
    assert status.reason.endswith("refused: packed codes differ from the reference")


FAULTS = {"dequantize": ("e2m1.h", "- 16", "- 17"), "syndromes": ("syndromes.h", "half ^= ", "half |= ")}


@needs_compiler
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_the_check_of_an_op_sees_one_wrong_rounding(op, fresh, monkeypatch):
    """The real sources with one tie, one decoded value or one sum changed."""
    module = import_module(f"tracefp4.ops.{op}.compiled")
    ops = module.LIBRARY._source.parents[1]
    folder = fresh / "ops" / op
    folder.mkdir(parents=True)
    for source in (*ops.glob("*.h"), *(ops / op).glob("*.[ch]")):
        (fresh / "ops" / source.relative_to(ops)).write_text(source.read_text())
    name, old, new = FAULTS.get(op, ("e2m1.h", "z >= 1.75f", "z > 1.75f"))
    changed = (ops / name).read_text().replace(old, new)
    assert changed != (ops / name).read_text()
    (fresh / "ops" / name).write_text(changed)
    library = Library(folder / "kernel.c", module.LIBRARY._signatures, module.LIBRARY._check)
    headers = tuple((fresh / "ops").glob("*.h"))
    monkeypatch.setattr("tracefp4.ops.kernels._HEADERS", headers)
    monkeypatch.setattr(module, "LIBRARY", library)
    assert "differ from the reference" in library.status().reason


GUIDED_HEADERS = ("cells", "keys", "recovery", "scale_cells", "search", "segments")


def test_the_sources_come_with_the_package():
    ops = Path(compiler.__file__).parent
    found = {str(path.relative_to(ops)) for path in ops.rglob("*.[ch]")}
    shared = {"e2m1.h", "scaling.h", "syndromes.h"}
    guided = {f"guided_quantize/{name}.h" for name in GUIDED_HEADERS}
    assert found == {*shared, *guided, *(f"{op}/kernel.c" for op in WITH_KERNELS)}


def test_a_named_compiled_backend_is_refused_for_other_devices():
    with pytest.raises(BackendError, match="on the CPU, not on cuda"):
        choose("quantize", "cuda", Backend.COMPILED)
    assert choose("quantize", "cuda") is Backend.REFERENCE


def test_the_flags_keep_ieee_arithmetic():
    assert "-ffp-contract=off" in compiler._FLAGS
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(compiler._FLAGS)
