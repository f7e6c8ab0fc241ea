"""How fast a directory store takes and gives rows: cost of an append, MB/s written and read, with and without sync.

Columns are those of a record of 40 layers kept as syndromes (112 + 128 bytes a position and layer). Trajectories are
appended in spans, finished together, read whole and then by two layers of them. Reads come from the page cache: the
figures say what the store costs, not what the medium does.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time

from tracefp4.store import DirectoryReader, DirectoryWriter, Segment, WriterOptions

LAYERS, WIDTHS = 40, {"codes": 112, "scales": 128}


def measure(path: str, *, trajectories: int, rows: int, span: int, durable: bool) -> dict[str, float]:
    """Write and read; times in microseconds, rates in MB/s of columns."""
    columns = {
        f"{layer}.{name}": os.urandom(span * width)
        for layer in range(LAYERS)
        for name, width in WIDTHS.items()
    }
    appends, pending = [], []
    began = time.perf_counter()
    with DirectoryWriter(path, WriterOptions(durable=durable)) as writer:
        for index in range(trajectories):
            for start in range(0, rows, span):
                before = time.perf_counter()
                writer.append(
                    Segment(trajectory=f"t{index}", start=start, num_rows=span, columns=columns, generation=0)
                )
                appends.append(time.perf_counter() - before)
            pending.append(writer.finish_soon(f"t{index}"))
        handles = [future.result() for future in pending]
        seconds = time.perf_counter() - began
        written, waits = writer.stats.bytes_written, writer.stats.num_waits
    reader = DirectoryReader(path)
    began = time.perf_counter()
    got = sum(len(data) for handle in handles for data in reader.read(handle, columns, 0, rows).values())
    whole = time.perf_counter() - began
    two = ["3.codes", "3.scales", "17.codes", "17.scales"]
    before, began = reader.bytes_read, time.perf_counter()
    part = sum(len(data) for handle in handles for data in reader.read(handle, two, 0, rows).values())
    some = time.perf_counter() - began
    assert (got, part) == (written, written // 20)
    return {
        "append us, median": statistics.median(appends) * 1e6,
        "append us, p99": sorted(appends)[len(appends) * 99 // 100] * 1e6,
        "waits": waits,
        "written MB/s": written / seconds / 1e6,
        "read MB/s": got / whole / 1e6,
        "two layers MB/s": part / some / 1e6,
        "bytes read for them, per byte": (reader.bytes_read - before) / part,
    }


def main() -> None:
    """Print one row for every span and durability."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="a directory on the medium to measure; default: a temporary one")
    parser.add_argument("--trajectories", type=int, default=60)
    parser.add_argument("--rows", type=int, default=512)
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    for durable in (True, False):
        for span in (16, 64, 256):
            with tempfile.TemporaryDirectory(dir=options.path) as path:
                found = measure(
                    path, trajectories=options.trajectories, rows=options.rows, span=span, durable=durable
                )
            figures = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            print(f"durable {durable}, {span} rows an append: {figures}")


if __name__ == "__main__":
    main()
