"""From a C file to a loaded shared library: find the machine's compiler, compile at first use, keep the result.

The library is compiled for this machine's processor and kept in a cache folder that is named by everything that
decides its bytes: the sources, the flags, the compiler's version and the processor's features. The file's name is
the digest of its own content, so a damaged file is never loaded but compiled again. A file appears in the cache by
one rename, so processes that compile at the same time do not meet. This module knows no op and no tensor.

The flags keep IEEE arithmetic: no contraction into fused multiply-adds, and no -ffast-math even where $CC asks for
it: a library linked that way makes the whole process flush subnormals to zero. -fno-math-errno and -fno-trapping-math
drop side effects that nobody reads (errno, exception flags) and change no result.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tracefp4.errors import BackendError
from tracefp4.ops.cache import cache_folder, digest_of

_LOG = logging.getLogger(__name__)
_FLAGS = (
    *("-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-fPIC", "-shared"),
)
_FOR_THIS_PROCESSOR = "-march=native"
_NAMES = ("cc", "gcc", "clang")
_LIMIT_S = 300
"""A compiler that needs longer is taken to hang; the kernels take a few seconds."""


class Compiler(NamedTuple):
    """A C compiler that answers."""

    command: tuple[str, ...]
    """The program and the arguments that $CC holds."""
    version: str
    """The first line of its `--version`."""


class Built(NamedTuple):
    """A loaded library."""

    functions: ctypes.CDLL
    """Its functions, by name."""
    made_by: str
    """Compiler, version and flags, for `tracefp4 doctor`."""


def load(source: Path, headers: tuple[Path, ...]) -> Built:
    """Compile a C file unless the cache holds it, and load it.

    Args:
        source: The C file.
        headers: Files that it includes, whose content decides about the cache as well.

    Returns:
        The library.

    Raises:
        BackendError: No compiler, or one that fails, or no folder from which its library can be loaded; the message
            says which and how.
    """
    compiler = _find()
    sources = b"\0".join(path.read_bytes() for path in (source, *headers))
    failure = ""
    for optional in ((_FOR_THIS_PROCESSOR,), ()):
        flags = (*_FLAGS, *optional)
        key = "\0".join((*compiler.command, compiler.version, *flags, _processor()))
        name = hashlib.sha256(key.encode() + sources).hexdigest()[:16]
        functions = _kept_or_made(compiler, flags, source, name)
        if isinstance(functions, ctypes.CDLL):
            return Built(functions, f"compiled by {compiler.version}, {' '.join(('-O3', *optional))}")
        failure = failure or functions
    raise BackendError(
        f"{compiler.version} cannot compile {source.name}: {failure}. gcc 9 or clang 10 and later can. "
        "Set CC to such a compiler."
    )


def _kept_or_made(compiler: Compiler, flags: tuple[str, ...], source: Path, name: str) -> ctypes.CDLL | str:
    """Load the library of this name, compiled now unless it is kept; why it cannot be had when that fails."""
    try:
        folder = cache_folder() / name
        return _cached(folder) or _compiled(compiler, flags, source, folder)
    except OSError as problem:  # a library for another machine, a folder mounted noexec, a full disk
        return f"error: {problem}"


@cache
def _find() -> Compiler:
    chosen = os.environ.get("CC", "").strip()
    try:
        candidates = [tuple(shlex.split(chosen))] if chosen else [(name,) for name in _NAMES]
    except ValueError as problem:
        raise BackendError(
            f"CC cannot be read as a command; got CC={chosen} ({problem}). It holds a compiler and its arguments, in "
            "a shell's quotes. Correct or unset CC."
        ) from problem
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        answer = _run((*command, "--version"))
        if answer.returncode == 0 and answer.stdout.strip():
            return Compiler(command, answer.stdout.strip().splitlines()[0])
    looked_for = f"CC={chosen}" if chosen else f"{', '.join(_NAMES)} on PATH, and $CC is not set"
    raise BackendError(f"no C compiler found (looked for {looked_for}). Install gcc or clang, or set CC.")


def _compiled(compiler: Compiler, flags: tuple[str, ...], source: Path, folder: Path) -> ctypes.CDLL | str:
    """Compile into the cache folder and load; what the compiler said when it fails."""
    _LOG.warning("compiling %s/%s for this processor, once: a few seconds", source.parent.name, source.name)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="compiling-") as scratch:
        made = Path(scratch) / "kernels.so"
        answer = _run((*compiler.command, *flags, str(source), "-o", str(made)))
        if answer.returncode != 0 or not made.exists():
            lines = answer.stderr.strip().splitlines() or [
                f"exit status {answer.returncode} without a message"
            ]
            return next((line for line in lines if "error" in line), lines[0])
        folder.mkdir(exist_ok=True)
        kept = folder / f"{digest_of(made)}.so"
        made.replace(kept)
        return ctypes.CDLL(str(kept))


def _cached(folder: Path) -> ctypes.CDLL | None:
    """Load what an earlier process compiled; files that are not what their name says are removed."""
    for path in sorted(folder.glob("*.so")):
        if digest_of(path) == path.stem:
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    return None


@cache
def _processor() -> str:
    """Name what -march=native depends on: the architecture and, where the system tells, the processor's features."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else [platform.processor()]
    features = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return platform.machine() + (features or lines)[0]


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return subprocess.CompletedProcess(command, 1, "", f"error: {problem}")
