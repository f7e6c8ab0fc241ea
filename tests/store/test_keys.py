"""A server with a key lets in who holds it and nobody else; without a key it serves its own host only."""

import stat

import pytest
import zmq
from tests.store.material import write

from tracefp4.errors import BackendError, ConfigError
from tracefp4.store.backends import open_directory, open_remote
from tracefp4.store.connection import LineSettings
from tracefp4.store.keys import StoreKey, read_key, write_key
from tracefp4.store.remote import RemoteReader
from tracefp4.store.server import StoreServer


@pytest.fixture
def key(tmp_path):
    write_key(tmp_path / "key")
    return read_key(tmp_path / "key")


@pytest.fixture
def served(tmp_path, key):
    local = open_directory(tmp_path / "served")
    server = StoreServer(local, bind="tcp://127.0.0.1:0", key=key).start()
    yield server
    server.stop()
    local.close()


def test_who_holds_the_key_writes_and_reads(served, tmp_path):
    store = open_remote(served.address, key=tmp_path / "key")
    handle = write(store.writer, "a")
    assert len(store.reader.read(handle, ["valid"], 0, 12)["valid"]) == 12
    store.close()


def other_keys(key):
    public, secret = zmq.curve_keypair()
    return {
        "no key": None,
        "another key": StoreKey(public=public, secret=secret),
        # Knows the public half, which an observer may, and proves that it holds another secret.
        "a key of its own": (key.public, StoreKey(public=public, secret=secret)),
    }


@pytest.mark.parametrize("kind", ["no key", "another key", "a key of its own"])
def test_nobody_else_gets_as_far_as_a_message(served, key, kind, monkeypatch):
    held = other_keys(key)[kind]
    if isinstance(held, tuple):
        server_key, held = held
        set_option = zmq.Socket.setsockopt
        monkeypatch.setattr(
            zmq.Socket,
            "setsockopt",
            lambda s, o, v: set_option(s, o, server_key if o == zmq.CURVE_SERVERKEY else v),
        )
    reader = RemoteReader(served.address, settings=LineSettings(timeout_s=0.5, retries=0, key=held))
    with pytest.raises(BackendError, match=r"cannot be reached.*the same key, or without one"):
        reader.trajectories()
    assert served.stats.requests == 0
    assert (served.stats.refused > 0) == (kind == "a key of its own")
    reader.close()


def test_a_client_with_a_key_does_not_speak_to_a_server_without_one(tmp_path, key):
    local = open_directory(tmp_path / "served")
    server = StoreServer(local, bind="tcp://127.0.0.1:0").start()
    reader = RemoteReader(server.address, settings=LineSettings(timeout_s=0.5, retries=0, key=key))
    with pytest.raises(BackendError, match="cannot be reached"):
        reader.trajectories()
    assert server.stats.requests == 0
    reader.close()
    server.stop()
    local.close()


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.0.0.5:5555", "tcp://localhost.example.org:0"]
)
def test_an_address_that_others_reach_needs_a_key(tmp_path, bind):
    local = open_directory(tmp_path)
    with pytest.raises(ConfigError, match="Make a key with `tracefp4 store key FILE`"):
        StoreServer(local, bind=bind)
    local.close()


def test_an_address_that_others_reach_is_served_with_a_key(tmp_path, key):
    local = open_directory(tmp_path / "served")
    server = StoreServer(local, bind="tcp://0.0.0.0:0", key=key).start()
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    reader = RemoteReader(address, settings=LineSettings(key=key))
    assert dict(reader.trajectories()) == {}
    reader.close()
    server.stop()
    local.close()


def test_a_key_is_its_owners_and_is_never_shown(tmp_path, key):
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert key.secret.decode() not in repr(LineSettings(key=key)) and len(key.public) == 40
    with pytest.raises(ConfigError, match="Key not written to .*: File exists"):
        write_key(tmp_path / "key")
    assert read_key(tmp_path / "key") == key


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"\xff" * 40, b"~" * 40])
def test_files_that_hold_no_key_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="Key of a store refused"):
        read_key(tmp_path / "key")
