"""From a CUDA C++ file to machine code for one GPU architecture, by NVIDIA's runtime compiler; no GPU is needed.

What was compiled is kept (`cache.py`) under everything that decides its bytes: the sources, the defines, the
options, the architecture and the compiler's version. Kernels are specialised by defines, not by arguments, where a
constant makes them faster; a variant takes a few hundred milliseconds, once per machine. This module knows no op and
no tensor.

Contraction into fused multiply-adds is off unless a library asks for it, since bytes must equal those of the
definition; division and square root are IEEE's, subnormals are kept.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tracefp4.errors import BackendError
from tracefp4.ops.cache import cache_folder, digest_of

_LOG = logging.getLogger(__name__)
_OPS = Path(__file__).parent
Defines = Mapping[str, int | str]
"""Preprocessor constants of a variant."""


class Built(NamedTuple):
    """Machine code of one variant of a file."""

    code: bytes
    """A cubin."""
    made_by: str
    """Compiler and version, for `tracefp4 doctor`."""
    seconds: float
    """Compile time; 0 if the code was kept."""


def build(source: Path, *, defines: Defines, architecture: str, contracts: bool = False) -> Built:
    """Compile one variant of a file unless the cache holds it.

    Args:
        source: The .cu file; it may include headers of its own folder and of ops.
        defines: Its preprocessor constants.
        architecture: For example "sm_90a".
        contracts: Allow a * b + c in one rounding.

    Returns:
        The machine code.

    Raises:
        BackendError: No compiler is installed, or it refuses the file; the message says why and what to do.
    """
    made_by = f"NVRTC {_version()}"
    key = repr((sorted(defines.items()), architecture, contracts, made_by))
    digest = hashlib.sha256(key.encode())
    for path in (source, *_headers(source)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = cache_folder() / digest.hexdigest()[:16]
    for path in sorted(folder.glob("*.cubin")):
        if digest_of(path) == path.stem:
            return Built(path.read_bytes(), made_by, 0.0)
        path.unlink(missing_ok=True)
    start = time.perf_counter()
    code = _compile(source, defines, architecture, contracts)
    seconds = time.perf_counter() - start
    _LOG.info("compiled %s/%s for %s in %.2f s", source.parent.name, source.name, architecture, seconds)
    _keep(folder, code)
    return Built(code, made_by, seconds)


def is_installed() -> tuple[bool, str]:
    """Say whether the compiler and the binding are installed, and their versions or what is missing."""
    try:
        core = _binding("cuda.core")
        if not hasattr(core, "Program"):
            raise BackendError(
                _MISSING.format(problem=f"cuda-core {core.__version__}, which is older than 1.0")
            )
        return True, f"NVRTC {_version()}"
    except BackendError as problem:
        return False, str(problem)


def _headers(source: Path) -> list[Path]:
    found = [*_OPS.glob("*.h"), *_OPS.glob("*.cuh"), *source.parent.glob("*.h"), *source.parent.glob("*.cuh")]
    return sorted(found)


def _keep(folder: Path, code: bytes) -> None:
    """Write the code under its digest, by one rename; a cache that cannot be written costs only time."""
    name = hashlib.sha256(code).hexdigest()
    try:
        folder.mkdir(exist_ok=True)
        unfinished = folder / f"{name}.{time.monotonic_ns()}"
        unfinished.write_bytes(code)
        unfinished.replace(folder / f"{name}.cubin")
    except OSError as problem:
        _LOG.warning("compiled code is not kept: %s", problem)


@cache
def _version() -> str:
    nvrtc = _binding("cuda.bindings.nvrtc")
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as problem:
        raise BackendError(_MISSING.format(problem=str(problem).splitlines()[0])) from problem
    assert int(error) == 0
    return f"{major}.{minor}"


def _binding(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise BackendError(_MISSING.format(problem=problem)) from problem


_MISSING = (
    "kernels for NVIDIA GPUs need NVRTC and its binding; got: {problem}. They come with the extra `cuda`. "
    "pip install 'tracefp4[cuda]'."
)


def _compile(source: Path, defines: Defines, architecture: str, contracts: bool) -> bytes:
    core = _binding("cuda.core")
    options = core.ProgramOptions(
        name=f"{source.parent.name}/{source.name}",
        arch=architecture,
        std="c++17",
        fma=contracts,
        define_macro=[f"{name}={value}" for name, value in sorted(defines.items())] or None,
        include_path=[str(source.parent), str(_OPS)],
        device_as_default_execution_space=True,
    )
    try:
        program = core.Program(source.read_text(encoding="utf-8"), "c++", options)
        code = program.compile("cubin").code
    except Exception as problem:  # the binding has classes of its own for a program that does not compile
        lines = [line for line in str(problem).splitlines() if "error" in line] or [str(problem)]
        raise BackendError(
            f"NVRTC {_version()} cannot compile {source.parent.name}/{source.name} for {architecture}: {lines[0]}. "
            "It compiles for sm_89 and later. Report this with `tracefp4 doctor`, or pass Backend.REFERENCE."
        ) from problem
    return bytes(code)
