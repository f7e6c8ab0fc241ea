"""Run the kernels in .cu files on the processor: a `Runner` that compiles them with g++ and emulated.h.

    library.runner = Emulator()             # tensors are on the CPU from here on

Shared libraries are kept in the cache folder of the compiled kernels. `order` is the order in which the threads of a
block take their turns; a result that depends on it has a race.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from tracefp4.ops.cache import cache_folder
from tracefp4.ops.device import Argument, Launch, Program, packed_arguments

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "src" / "tracefp4" / "ops"
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_KERNEL = re.compile(r"^KERNEL (?:__launch_bounds__\(.*\) |[A-Z]+ )?(\w+)\(", re.MULTILINE)


class Emulator:
    """Runs launches one after the other; `launches` counts them by kernel, `variants` holds what they ran."""

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self.launches: dict[str, int] = {}
        self.variants: set[tuple] = set()
        self._libraries: dict[tuple, ctypes.CDLL] = {}

    def run(
        self, program: Program, launch: Launch, arguments: tuple[Argument, ...], device: torch.device
    ) -> None:
        assert device.type == "cpu", "the emulation reads tensors on the CPU"
        key = (program.source, tuple(sorted(launch.defines.items())))
        if key not in self._libraries:
            self._libraries[key] = ctypes.CDLL(str(compiled(program.source, dict(launch.defines))))
        function = getattr(self._libraries[key], f"emulated_{launch.kernel}")
        values = packed_arguments(arguments)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid = (ctypes.c_uint32 * 3)(*launch.grid, *(1,) * (3 - len(launch.grid)))
        size = (ctypes.c_uint32 * 3)(launch.threads, 1, 1)
        refused = function(grid, size, ctypes.c_int64(launch.shared_bytes), self.order, addresses)
        assert not refused, f"no GPU accepts {launch}"
        self.variants.add((*key, launch.kernel))
        self.launches[launch.kernel] = self.launches.get(launch.kernel, 0) + 1


def compiled(source: Path, defines: dict[str, int | str]) -> Path:
    """Compile one variant for the processor unless the cache holds it."""
    assert COMPILER is not None, "the emulation needs g++"
    text = source.read_text(encoding="utf-8")
    kernels = _KERNEL.findall(text)
    files = sorted(
        [*OPS.glob("*.h"), *OPS.glob("*.cuh"), *source.parent.glob("*.h"), *source.parent.glob("*.cuh")]
    )
    key = repr((sorted(defines.items()), FLAGS, text)).encode()
    key += b"".join(path.read_bytes() for path in (*files, *sorted(HERE.glob("*.h"))))
    library = cache_folder() / f"emulated-{hashlib.sha256(key).hexdigest()[:24]}.so"
    if library.exists():
        return library
    wrapper = library.with_suffix(f".{os.getpid()}.cpp")
    exports = "\n".join(f"EMULATED({name})" for name in kernels)
    wrapper.write_text(
        f'#define TRACEFP4_EMULATED\n#include "emulated.h"\n#include "{source}"\n#include "launch.h"\n{exports}\n',
        encoding="utf-8",
    )
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    command = [COMPILER, *FLAGS, f"-I{HERE}", f"-I{OPS}", f"-I{source.parent}"]
    command += [f"-D{name}={value}" for name, value in defines.items()]
    answer = subprocess.run(
        [*command, str(wrapper), "-o", str(unfinished)], capture_output=True, text=True, check=False
    )
    wrapper.unlink()
    assert answer.returncode == 0, answer.stderr[:4000]
    unfinished.replace(library)
    return library
