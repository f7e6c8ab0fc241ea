"""The contract of every store, and what a directory adds to it."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracefp4.store
import tracefp4.store.directory as directory
from tracefp4.errors import BackendError, RecordError
from tracefp4.store import DirectoryStore, MemoryStore, MissingKeyError

SOURCE = Path(tracefp4.store.__file__).parents[2]
ODD_KEYS = [
    "a",
    "../../etc/passwd",
    "..",
    ".",
    "a/b",
    "a%2Fb",
    "x.partial",
    "x.chunk",
    "trace 7 \N{SNOWMAN}",
    "-rf",
    "~",
]


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "records")


def test_what_was_put_is_what_one_gets(store):
    store.put("a", b"first")
    store.put("b", b"")
    assert (store.get("a"), store.get("b")) == (b"first", b"")
    store.put("a", b"second")
    assert store.get("a") == b"second"
    assert store.keys() == ["a", "b"]
    assert "a" in store
    assert "c" not in store


def test_deleted_and_unknown_keys_are_missing(store):
    store.put("a", b"1")
    store.delete("a")
    assert store.keys() == []
    for act in (store.get, store.delete):
        with pytest.raises(MissingKeyError, match="No bytes under key 'a'"):
            act("a")
    assert issubclass(MissingKeyError, RecordError)


def test_odd_keys_are_kept_apart(store):
    for key in ODD_KEYS:
        store.put(key, key.encode())
    assert store.keys() == sorted(ODD_KEYS)
    assert all(store.get(key) == key.encode() for key in ODD_KEYS)


@pytest.mark.parametrize("key", ["", "k" * 161])
def test_empty_and_overlong_keys_are_refused(store, key):
    with pytest.raises(RecordError, match=f"got {len(key)} characters"):
        store.put(key, b"1")


def test_later_changes_of_the_callers_buffer_do_not_reach_the_store(store):
    buffer = bytearray(b"abc")
    store.put("a", buffer)
    buffer[0] = 0
    assert store.get("a") == b"abc"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.text(min_size=1, max_size=15), data=st.binary(max_size=200))
def test_any_key_and_any_bytes_round_trip(store, key, data):
    store.put(key, data)
    assert store.get(key) == data
    assert store.keys() == [key]
    store.delete(key)
    assert key not in store


def test_no_key_leaves_the_directory(tmp_path):
    store = DirectoryStore(tmp_path / "records")
    for key in ODD_KEYS:
        store.put(key, b"1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["records"]
    assert len(list(store.path.iterdir())) == len(ODD_KEYS)
    with pytest.raises(RecordError, match="escapes to"):
        store.put("\N{SNOWMAN}" * 100, b"1")


def test_another_process_reads_what_was_put(tmp_path):
    DirectoryStore(tmp_path).put("a", b"1")
    assert DirectoryStore(tmp_path).get("a") == b"1"


def test_every_damaged_byte_is_refused(tmp_path):
    store = DirectoryStore(tmp_path)
    store.put("a", b"some bytes")
    file = next(tmp_path.iterdir())
    good = file.read_bytes()
    for place in range(len(good)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(RecordError):
            store.get("a")
    for keep in (0, 10, len(good) - 1):
        file.write_bytes(good[:keep])
        with pytest.raises(RecordError, match="damaged"):
            store.get("a")
    file.write_bytes(good + b"\0")
    with pytest.raises(RecordError, match="found 11 bytes, expected 10 bytes"):
        store.get("a")


def test_damage_shows_both_checksums(tmp_path):
    store = DirectoryStore(tmp_path)
    store.put("a", b"some bytes")
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RecordError, match=r"found [0-9a-f]{32}, expected [0-9a-f]{32}"):
        store.get("a")


def test_another_container_schema_is_refused(tmp_path):
    store = DirectoryStore(tmp_path)
    store.put("a", b"1")
    file = next(tmp_path.iterdir())
    chunk = bytearray(file.read_bytes())
    chunk[8] = 9
    file.write_bytes(chunk)
    with pytest.raises(RecordError, match="schema version 9, this version reads"):
        store.get("a")


def test_leftovers_of_dead_writers_are_invisible_and_removed(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    leftover = tmp_path / f"{dead.stdout.strip()}-00aa.partial"
    nameless = tmp_path / "x.partial"
    own = tmp_path / f"{os.getpid()}-11bb.partial"
    store = DirectoryStore(tmp_path)
    for file in (leftover, nameless, own):
        file.write_bytes(b"half")
    assert store.keys() == []
    store.put("a", b"1")
    reopened = DirectoryStore(tmp_path)
    assert reopened.keys() == ["a"]
    assert not leftover.exists()
    assert not nameless.exists()
    assert own.exists()


def test_a_full_disk_is_an_error_with_path_and_bytes_and_leaves_the_old_bytes(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)
    store.put("a", b"old")

    def fill_up(path, chunk):
        path.write_bytes(chunk[: len(chunk) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory, "_write_synced", fill_up)
    with pytest.raises(
        BackendError, match=r"No space left on device. The disk must take 1036 bytes"
    ) as refusal:
        store.put("a", b"n" * 1000)
    assert str(tmp_path) in str(refusal.value)
    assert store.get("a") == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_the_system_really_refuses_leaves_nothing(tmp_path):
    code = f"""
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    from tracefp4.errors import BackendError
    from tracefp4.store import DirectoryStore
    store = DirectoryStore({str(tmp_path)!r})
    store.put("small", b"1")
    try:
        store.put("large", b"1" * 100_000)
    except BackendError as error:
        print(error)
    """
    done = run_python(code)
    assert "100036 bytes" in done.stdout, done.stderr
    assert DirectoryStore(tmp_path).keys() == ["small"]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_put_leaves_no_partial_file(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)

    def interrupted(path, chunk):
        path.write_bytes(chunk[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "_write_synced", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("a", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path):
    file = tmp_path / "taken"
    file.write_bytes(b"")
    with pytest.raises(BackendError, match=r"Cannot use .*taken as a store"):
        DirectoryStore(file)


def test_the_store_works_where_torch_and_numpy_are_absent(tmp_path):
    code = f"""
    import sys
    for name in ("torch", "numpy", "transformers"):
        sys.modules[name] = None
    from tracefp4.store import DirectoryStore, MemoryStore
    store = DirectoryStore({str(tmp_path)!r})
    store.put("a", b"1")
    MemoryStore().put("a", store.get("a"))
    print(store.keys())
    """
    done = run_python(code)
    assert done.stdout.strip() == "['a']", done.stderr


def run_python(code):
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
