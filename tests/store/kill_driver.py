"""A process without torch that forks writers and readers, kills them, and checks what is left; run by test_faults_kill.

Usage: python kill_driver.py MODE DIRECTORY ROUNDS SEED. Prints one line of JSON.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from tests.store.material import segment, write, wrong_bytes

from tracefp4.store import (
    ConflictError,
    DirectoryReader,
    DirectoryRetention,
    DirectoryWriter,
    Handle,
    Prefetcher,
    Request,
    Segment,
    WriterOptions,
    disk,
)
from tracefp4.store.inspection import check_store

NUM_ROWS, SPAN = 12, 5


def write_many(directory, report, *, count, prefix, chunk_bytes=3000, durable=True):
    """Write trajectories, some left unfinished, some given up; report each handle on a pipe."""
    writer = DirectoryWriter(directory, WriterOptions(chunk_bytes=chunk_bytes, durable=durable))
    for index in range(count):
        name = f"{prefix}-{index}"
        if index % 5 == 3:
            writer.append(segment(f"{prefix}-open-{index}", 0, 4))
        if index % 5 == 4:
            writer.append(segment(f"{prefix}-given-up-{index}", 0, 4))
            writer.abandon(f"{prefix}-given-up-{index}")
        handle = write(writer, name, num_rows=NUM_ROWS, span=SPAN, generation=index)
        os.write(report, handle.to_json().encode() + b"\n")
    writer.close()


def forked(work):
    """Run `work(pipe)` in a child that never returns; return its id and the reading end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(writing)
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def drained(descriptor):
    """The whole lines that a child managed to write."""
    data = b""
    while part := os.read(descriptor, 1 << 16):
        data += part
    os.close(descriptor)
    return data.split(b"\n")[:-1]


def check(directory, handles):
    """Nothing acknowledged is lost, nothing is wrong, nothing given up is readable; return names seen."""
    with DirectoryReader(directory) as reader:
        seen = reader.trajectories()
        for handle in handles:
            wrong, absent = wrong_bytes(reader, handle, NUM_ROWS)
            assert (wrong, absent) == ([], ()), (handle, wrong, absent)
        for name, finished in seen.items():
            wrong, absent = wrong_bytes(reader, name, NUM_ROWS)
            assert not wrong, (name, wrong)
            assert not (finished and absent), (name, absent)
            assert all(span.reason == "never_written" for span in absent), (name, absent)
    report = check_store(directory)
    assert report.is_intact, report
    return seen


def killed_anywhere(directory, rounds, seed):
    """SIGKILL a writer at random times; the same store goes on."""
    generator, handles, kills = random.Random(seed), [], 0
    for index in range(rounds):
        child, pipe = forked(
            lambda out, i=index: write_many(directory, out, count=10**6, prefix=f"r{i}", durable=i % 2 == 0)
        )
        first = os.read(pipe, 1)
        time.sleep(generator.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        kills += os.waitpid(child, 0)[1] == signal.SIGKILL
        lines = drained(pipe)
        if lines:
            lines[0] = first + lines[0]
        acknowledged = [Handle.from_json(line) for line in lines]
        with DirectoryReader(directory) as reader:
            assert all(wrong_bytes(reader, handle, NUM_ROWS) == ([], ()) for handle in acknowledged)
        handles += acknowledged
    seen = check(directory, handles)
    writer = DirectoryWriter(directory)
    assert write(writer, "afterwards", num_rows=NUM_ROWS).num_rows == NUM_ROWS
    writer.close()
    left = sorted(path.name for path in directory.iterdir() if path.suffix == ".running")
    return {
        "kills": kills,
        "handles": len(handles),
        "unfinished": sum(not f for f in seen.values()),
        "left": left,
    }


def crash_at(operation, *, is_torn):
    """Make the disk operation with this number kill the process, after half of its bytes if `is_torn`."""
    count = [0]

    def counted(real, descriptor, *arguments):
        count[0] += 1
        if count[0] == operation:
            if is_torn and arguments:
                data, offset = arguments
                real(descriptor, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        return real(descriptor, *arguments)

    for name in ("write_all", "sync", "sync_directory"):
        setattr(disk, name, partial(counted, getattr(disk, name)))


def killed_at_every_operation(directory, rounds, seed):
    """SIGKILL a writer at its 1st, 2nd, ... disk operation until it gets through; every time in a new store."""
    operation, torn_tails = 0, 0
    for is_torn in (False, True):
        operation, status = 0, signal.SIGKILL
        while status == signal.SIGKILL:
            operation += 1
            place = directory / f"{is_torn}-{operation}"

            def work(out, number=operation, torn=is_torn, place=place):
                crash_at(number, is_torn=torn)
                write_many(place, out, count=rounds, prefix="r", chunk_bytes=1500)

            child, pipe = forked(work)
            handles = [Handle.from_json(line) for line in drained(pipe)]
            status = os.waitpid(child, 0)[1]
            if not (place / "manifest").exists():
                assert not handles and not list(place.glob("*.chunk"))
                continue
            check(place, handles)
            torn_tails += any(gap.is_tail for gap in check_store(place).damaged)
            writer = DirectoryWriter(place)
            write(writer, "afterwards", num_rows=NUM_ROWS)
            retention = DirectoryRetention(place)
            retention.discard(0)
            assert dict(DirectoryReader(place).trajectories()) == {}
            writer.close()
    return {"operations": operation, "torn_tails": torn_tails}


def killed_readers(directory, rounds, seed):
    """SIGKILL readers while a writer writes and retention removes: nobody else notices."""
    generator = random.Random(seed)
    writer, retention = (
        DirectoryWriter(directory, WriterOptions(chunk_bytes=2000)),
        DirectoryRetention(directory),
    )

    def read_on(out):
        reader = DirectoryReader(directory)
        while True:
            for name in reader.trajectories():
                wrong, _ = wrong_bytes(reader, name, NUM_ROWS)
                os.write(out, b"wrong\n" if wrong else b"right\n")

    right, kept = 0, {}
    for index in range(rounds):
        child, pipe = forked(read_on)
        os.read(pipe, 1) if kept else None
        for step in range(3):
            name = f"{index}.{step}"
            kept[name] = write(writer, name, num_rows=NUM_ROWS, span=SPAN, generation=index)
        time.sleep(generator.random() * 0.01)
        if index % 4 == 3:
            for name in retention.keep_last(2).trajectories:
                del kept[name]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = drained(pipe)
        assert b"wrong" not in lines
        right += len(lines)
        assert check(directory, kept.values()).keys() == kept.keys()
    writer.close()
    return {"right": right, "kept": len(kept)}


def racing(directory, rounds, seed):
    """Three processes write the same names at once; each name is one author's, and one of them is killed."""

    gate = os.pipe()

    def write_names(out, author):
        with DirectoryWriter(directory, WriterOptions(chunk_bytes=1500)) as writer:
            os.write(out, b"+")
            os.read(gate[0], 1)
            # Two begin at opposite ends, so that both are first somewhere.
            for index in reversed(range(rounds)) if author == "two" else range(rounds):
                try:
                    handle = write(writer, f"t{index}", num_rows=NUM_ROWS, span=SPAN, salt=author)
                except ConflictError:
                    continue
                os.write(out, handle.to_json().encode() + b"\n")

    children = {author: forked(partial(write_names, author=author)) for author in ("one", "two", "three")}
    for _, pipe in children.values():
        assert os.read(pipe, 1) == b"+"
    os.write(gate[1], b"+++")
    time.sleep(random.Random(seed).random() * 0.05)
    os.kill(children["three"][0], signal.SIGKILL)
    won = {}
    for author, (child, pipe) in children.items():
        for line in drained(pipe):
            handle = Handle.from_json(line)
            assert handle.trajectory not in won
            won[handle.trajectory] = (handle, author)
        os.waitpid(child, 0)
    with DirectoryReader(directory) as reader:
        for handle, author in won.values():
            assert wrong_bytes(reader, handle, NUM_ROWS, salts=[author]) == ([], ())
        seen = reader.trajectories()
        for name in seen.keys() - won.keys():
            assert not wrong_bytes(reader, name, NUM_ROWS, salts=["three"])[0]
    assert {f"t{index}" for index in range(rounds)} == seen.keys()
    assert check_store(directory).is_intact
    return {"won": sorted(author for _, author in won.values()), "seen": len(seen)}


def resident_memory(directory, rounds, seed):
    """Write, read ahead and remove, step by step; return the resident KiB after every step."""
    columns = {f"{layer}.x": os.urandom(64 * 256) for layer in range(40)}
    resident = []
    with DirectoryWriter(directory) as writer, DirectoryReader(directory) as reader:
        retention = DirectoryRetention(directory)
        with Prefetcher(reader, max_bytes=1 << 23) as ahead:
            for step in range(rounds):
                handles = []
                for index in range(4):
                    for start in range(0, 256, 64):
                        part = {name: bytearray(data) for name, data in columns.items()}
                        writer.append(
                            Segment(
                                trajectory=f"{step}/{index}",
                                start=start,
                                num_rows=64,
                                columns=part,
                                generation=step,
                            )
                        )
                    handles.append(writer.finish(f"{step}/{index}"))
                batches = [
                    ahead.submit([Request(trajectory=handle, columns=tuple(columns), start=0, stop=256)])
                    for handle in handles
                ]
                for batch in batches:
                    assert batch.result()[0].absent == ()
                retention.keep_last(2)
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4)
    return {"resident": resident}


MODES = {
    "racing": racing,
    "memory": resident_memory,
    "anywhere": killed_anywhere,
    "every_operation": killed_at_every_operation,
    "readers": killed_readers,
}

if __name__ == "__main__":
    sys.modules["torch"] = None
    mode, place, rounds, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    sys.stdout.write(json.dumps(MODES[mode](place, rounds, seed)) + "\n")
