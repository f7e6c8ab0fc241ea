"""How fast records travel: MB/s written until durable or acknowledged, and read back, for every backend of a store.

Columns are those of a record of 40 layers kept as syndromes (112 + 128 bytes a position and layer), 256 positions an
append. The server runs in a process of its own on this host, so the network is the loopback. Every backend writes the
same trajectories; the directory and the server are on the medium of --path.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tracefp4.store import Segment
from tracefp4.store.backends import OpenStore, open_directory, open_remote, open_shared

LAYERS, WIDTHS, ROWS = 40, {"codes": 112, "scales": 128}, 256


def measure(store: OpenStore, *, trajectories: int) -> tuple[float, float, float]:
    """(MB/s written, MB/s read whole, ms of one read of two layers)."""
    columns = {
        f"{n}.{name}": os.urandom(ROWS * width) for n in range(LAYERS) for name, width in WIDTHS.items()
    }
    began = time.perf_counter()
    pending = []
    for i in range(trajectories):
        store.writer.append(Segment(trajectory=f"t{i}", start=0, num_rows=ROWS, columns=columns))
        pending.append(store.writer.finish_soon(f"t{i}"))
    handles = [future.result() for future in pending]
    written = time.perf_counter() - began
    began = time.perf_counter()
    total = sum(len(data) for h in handles for data in store.reader.read(h, columns, 0, ROWS).values())
    whole = time.perf_counter() - began
    began = time.perf_counter()
    for handle in handles:
        store.reader.read(handle, ["3.codes", "3.scales", "17.codes", "17.scales"], 0, ROWS)
    some = time.perf_counter() - began
    return total / written / 1e6, total / whole / 1e6, some / trajectories * 1e3


def main() -> None:
    """Print one row for every backend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="a directory on the medium to measure; default: a temporary one")
    parser.add_argument("--trajectories", type=int, default=60)
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory(dir=options.path) as path:
        command = [
            sys.executable,
            "-m",
            "tracefp4",
            "store",
            "serve",
            f"{path}/served",
            "--bind",
            "tcp://127.0.0.1:0",
        ]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert server.stdout is not None
        found = re.search(r"tcp://[\d.]+:\d+", server.stdout.readline())
        assert found is not None
        stores = {
            "directory": open_directory(Path(path) / "records"),
            "shared memory": open_shared(f"bench-{os.getpid()}"),
            "server on this host": open_remote(found[0]),
        }
        for name, store in stores.items():
            written, whole, some = measure(store, trajectories=options.trajectories)
            print(
                f"{name}: written {written:.0f} MB/s, read {whole:.0f} MB/s, two layers of one record {some:.2f} ms"
            )
            store.close()
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    main()
