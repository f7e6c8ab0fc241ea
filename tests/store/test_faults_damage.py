"""Files cut short, bits flipped, files missing or of another schema: what is lost is named, nothing is read wrong."""

import shutil
import struct
import zlib

import pytest
from tests.store.material import WIDTHS, segment, write, wrong_bytes

from tracefp4.errors import RecordError, TraceFP4Error
from tracefp4.store import (
    DirectoryReader,
    DirectoryRetention,
    DirectoryWriter,
    GoneError,
    MissingTrajectoryError,
    Request,
    SpanError,
)
from tracefp4.store.chunks import ChunkFile, chunk_path
from tracefp4.store.frames import HEADER_BYTES
from tracefp4.store.inspection import check_store, rebuild_manifest
from tracefp4.store.manifest import Manifest

NUM_ROWS = 3
COLUMNS = ("0.k", "valid")


@pytest.fixture
def small(memory_path):
    """A store of two finished trajectories and an unfinished one, in one chunk."""
    place = memory_path / "store"
    with DirectoryWriter(place) as writer:
        handles = {
            name: write(writer, name, num_rows=NUM_ROWS, span=2, columns=COLUMNS) for name in ("a", "b")
        }
        writer.append(segment("open", 0, NUM_ROWS, columns=COLUMNS))
    return place, handles


def outcome(place, handles):
    """(name -> absent spans of what can be asked for, errors of opening); asserts that no byte is wrong."""
    try:
        reader = DirectoryReader(place)
    except TraceFP4Error as refusal:
        return None, refusal
    with reader:
        absent = {}
        for name, handle in handles.items():
            wrong, absent[name] = wrong_bytes(reader, handle, NUM_ROWS, columns=COLUMNS)
            assert not wrong
        for name in reader.trajectories():
            wrong, absent[f"by name {name}"] = wrong_bytes(reader, name, NUM_ROWS, columns=COLUMNS)
            assert not wrong
        return absent, None


def test_a_chunk_cut_at_any_byte_is_never_misread(small):
    place, handles = small
    file = chunk_path(place, 1, 0)
    whole = file.read_bytes()
    ends = {name: max(end for _, end in places(place, handle)) for name, handle in handles.items()}
    assert len(whole) > 700
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        absent, refusal = outcome(place, handles)
        assert refusal is None
        for name in handles:
            # A finished trajectory is whole as long as its last column is, and what is cut is named as damaged.
            assert (not absent[name]) == (length >= ends[name]), (length, name)
            assert {span.reason for span in absent[name]} <= {"damaged"}
        if 0 < length < HEADER_BYTES:
            assert {span.column for span in absent["a"]} == set(COLUMNS)


def test_a_manifest_cut_at_any_byte_hides_trajectories_and_never_misreads(small):
    place, handles = small
    file = place / "manifest"
    whole = file.read_bytes()
    seen = set()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        absent, refusal = outcome(place, handles)
        if length < HEADER_BYTES:
            assert isinstance(refusal, RecordError) and "header" in str(refusal)
            continue
        seen.add(tuple(sorted(name for name, spans in absent.items() if not spans)))
        assert {span.reason for name in handles for span in absent[name]} <= {"gone"}
    assert len(seen) == 3


def test_a_bit_flipped_anywhere_in_a_chunk_loses_what_it_hits_and_nothing_else(small):
    place, handles = small
    file = chunk_path(place, 1, 0)
    whole = file.read_bytes()
    bodies = [
        (start, end, name, column)
        for name, handle in handles.items()
        for column in COLUMNS
        for start, end in places(place, handle, column)
    ]
    hits = 0
    for place_of_bit in range(len(whole)):
        changed = bytearray(whole)
        changed[place_of_bit] ^= 1 << (place_of_bit % 8)
        file.write_bytes(changed)
        absent, refusal = outcome(place, handles)
        assert refusal is None
        hit = [(name, column) for start, end, name, column in bodies if start <= place_of_bit < end]
        if hit:
            hits += 1
            lost = [(name, span.column) for name in handles for span in absent[name]]
            assert lost == hit
            if (place_of_bit, *hit[0]) in {(start, name, column) for start, _, name, column in bodies}:
                assert [(span.trajectory, span.column) for span in check_store(place).lost] == hit
        assert {span.reason for name in handles for span in absent[name]} <= {"damaged"}
    assert hits == 2 * NUM_ROWS * sum(WIDTHS[column] for column in COLUMNS)


def test_a_bit_flipped_anywhere_in_the_manifest_hides_and_never_misreads(small):
    place, handles = small
    file = place / "manifest"
    whole = file.read_bytes()
    counts = {"whole": 0, "one": 0, "none": 0, "refused": 0}
    for place_of_bit in range(len(whole)):
        changed = bytearray(whole)
        changed[place_of_bit] ^= 1 << (place_of_bit % 8)
        file.write_bytes(changed)
        absent, refusal = outcome(place, handles)
        if refusal is not None:
            assert place_of_bit < HEADER_BYTES
            counts["refused"] += 1
            continue
        lost = [name for name in handles if absent[name]]
        counts[("whole", "one", "none")[len(lost)]] += 1
        # Damage behind the last frame looks like a frame being written: it says "gone", elsewhere "damaged".
        assert {span.reason for name in lost for span in absent[name]} <= {"damaged", "gone"}
    assert counts["refused"] == HEADER_BYTES
    assert counts["one"] > 100
    assert counts["none"] == 0


def test_damage_is_named_in_the_error_of_a_read(small):
    place, handles = small
    file = chunk_path(place, 1, 0)
    data = bytearray(file.read_bytes())
    start, _ = places(place, handles["a"], "0.k")[1]
    data[start] ^= 1
    file.write_bytes(data)
    reader = DirectoryReader(place)
    with pytest.raises(
        SpanError, match=r"rows 2\.\.2 of column '0.k' of trajectory 'a' in .*: damaged"
    ) as caught:
        reader.read(handles["a"], ["valid", "0.k"], 0, NUM_ROWS)
    assert [(span.start, span.stop) for span in caught.value.absent] == [(2, 3)]
    assert reader.read(handles["a"], ["0.k"], 0, 2)
    assert [(span.trajectory, span.column) for span in check_store(place).lost] == [("a", "0.k")]


def test_a_missing_manifest_is_refused_and_can_be_rebuilt(small):
    place, handles = small
    (place / "manifest").unlink()
    for open_it in (DirectoryReader, DirectoryWriter, lambda path: DirectoryRetention(path).forget(9)):
        with pytest.raises(RecordError, match="holds chunks and no file 'manifest'"):
            open_it(place)
    assert rebuild_manifest(place) == ("a", "b")
    absent, _ = outcome(place, handles)
    assert absent == {"a": (), "b": (), "by name a": (), "by name b": (), "by name open": ()}
    with DirectoryWriter(place) as writer:
        write(writer, "later")
    assert dict(DirectoryReader(place).trajectories()) == {"a": True, "b": True, "later": True, "open": False}


def test_a_damaged_manifest_can_be_rebuilt_and_keeps_what_it_knows(small):
    place, handles = small
    DirectoryRetention(place).remove(["b"])
    manifest = Manifest(place)
    manifest.refresh()
    data = bytearray((place / "manifest").read_bytes())
    data[data.index(manifest.entries["a"])] ^= 1
    (place / "manifest").write_bytes(data)
    with DirectoryReader(place) as reader:
        with pytest.raises(RecordError, match="is damaged: found no such entry"):
            reader.read(handles["a"], ["0.k"], 0, 1)
        assert "a" not in reader.trajectories()
    # What was removed comes back with it: the chunk is still there, and the old manifest cannot say why.
    assert set(rebuild_manifest(place)) == {"a", "b"}
    assert outcome(place, handles)[0]["a"] == ()


def test_a_missing_chunk_is_damage_of_what_lies_in_it(small):
    place, handles = small
    chunk_path(place, 1, 0).unlink()
    absent, _ = outcome(place, handles)
    assert {(span.column, span.start, span.stop, span.reason) for span in absent["a"]} == {
        (column, 0, NUM_ROWS, "damaged") for column in COLUMNS
    }


@pytest.mark.parametrize("schema", [0, 2, 77])
@pytest.mark.parametrize("name", ["manifest", "00000001-00000000.chunk"])
def test_another_schema_is_refused_by_name(small, schema, name):
    place, handles = small
    data = bytearray((place / name).read_bytes())
    struct.pack_into("<I", data, 8, schema)
    struct.pack_into("<I", data, HEADER_BYTES - 4, zlib.crc32(data[: HEADER_BYTES - 4]))
    (place / name).write_bytes(data)
    if name == "manifest":
        for open_it in (DirectoryReader, DirectoryWriter, lambda path: DirectoryRetention(path).forget(9)):
            with pytest.raises(RecordError, match=f"schema version {schema}. This version reads"):
                open_it(place)
    else:
        assert f"schema version {schema}" in check_store(place).refused[0]
        absent, _ = outcome(place, handles)
        assert {span.reason for span in absent["a"]} == {"damaged"}
    assert (place / name).read_bytes() == data


def test_files_that_took_each_others_names_are_refused(tmp_path):
    for name in ("one", "two"):
        with DirectoryWriter(tmp_path / name) as writer:
            handle = write(writer, name)
            if name == "two":
                writer.append(segment("more", 0, 4))
    shutil.copy(chunk_path(tmp_path / "two", 1, 0), chunk_path(tmp_path / "one", 1, 0))
    reader = DirectoryReader(tmp_path / "one")
    wrong, absent = wrong_bytes(reader, "one", 12)
    assert not wrong
    assert {span.reason for span in absent} == {"damaged"}
    shutil.copy(chunk_path(tmp_path / "two", 1, 0), chunk_path(tmp_path / "two", 7, 3))
    assert "its header says" in check_store(tmp_path / "two").refused[0]
    with pytest.raises(GoneError):
        reader.stat(handle)


def test_a_directory_made_anew_is_another_store(tmp_path):
    place = tmp_path / "store"
    with DirectoryWriter(place) as writer:
        old = write(writer, "a", salt="old")
    reader = DirectoryReader(place)
    assert wrong_bytes(reader, old, 12, salts=["old"]) == ([], ())
    shutil.rmtree(place)
    with DirectoryWriter(place) as writer:
        new = write(writer, "a", salt="new")
    assert wrong_bytes(reader, new, 12, salts=["new"]) == ([], ())
    shutil.rmtree(place)
    place.mkdir()
    with pytest.raises(MissingTrajectoryError):
        reader.stat("a")


def test_frames_between_damage_are_found_again(tmp_path):
    with DirectoryWriter(tmp_path) as writer:
        for index in range(5):
            write(writer, f"t{index}", num_rows=4)
        writer.append(segment("open", 0, 4))
        writer.flush()
        writer.append(segment("open", 4, 4))
    file = chunk_path(tmp_path, 1, 0)
    data = bytearray(file.read_bytes())
    first = data.index(b"open")
    data[first] ^= 1
    file.write_bytes(data)
    found = DirectoryReader(tmp_path).read_available(
        Request(trajectory="open", columns=("0.k",), start=0, stop=8)
    )
    assert [(span.start, span.stop, span.reason) for span in found.absent] == [(0, 4, "never_written")]
    report = check_store(tmp_path)
    assert [(gap.file, gap.is_tail) for gap in report.damaged] == [(file.name, False)]
    assert not report.is_intact


def places(place, handle, column=None):
    """(start, end) of a trajectory's columns in the first chunk."""
    manifest = Manifest(place)
    manifest.refresh()
    chunk = ChunkFile(place, 1, 0)
    found = []
    for ref in manifest.entry(handle.trajectory).segments:
        head = chunk.head_at(ref)
        for name in COLUMNS if column is None else [column]:
            offset, size = head.column_span(name)
            found.append((offset, offset + size))
    chunk.close()
    manifest.close()
    return found
