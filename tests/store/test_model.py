"""A directory store against a dict: any order of appends, finishes, removals, deaths and reopenings gives the same."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.store.conftest import SHARED_MEMORY
from tests.store.material import WIDTHS, segment, wrong_bytes

from tracefp4.store import (
    ConflictError,
    DirectoryReader,
    DirectoryRetention,
    DirectoryWriter,
    GoneError,
    MissingTrajectoryError,
    WriterOptions,
)
from tracefp4.store.inspection import check_store

NAMES = st.sampled_from(["a", "b", "c"])
WRITERS = st.integers(0, 1)
NUM_ROWS = 8


class StoreMachine(RuleBasedStateMachine):
    """Two writers, one long-lived reader and retention; the model is rows by (writer, name)."""

    @initialize()
    def open(self):
        self.place = Path(tempfile.mkdtemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        self.options = WriterOptions(chunk_bytes=600, durable=False)
        self.writers = [DirectoryWriter(self.place, self.options) for _ in range(2)]
        self.reader, self.retention = DirectoryReader(self.place), DirectoryRetention(self.place)
        self.serial = 0
        # (writer, name) -> (salt, rows, generation); name -> (handle, salt, rows, generation).
        self.pending, self.finished, self.gone = {}, {}, []

    @rule(
        writer=WRITERS,
        name=NAMES,
        start=st.integers(0, NUM_ROWS - 2),
        length=st.integers(1, 3),
        version=st.integers(0, 5),
    )
    def append(self, writer, name, start, length, version):
        stop = min(start + length, NUM_ROWS)
        self.serial += 1
        salt, have, generation = self.pending.get((writer, name), (str(self.serial), frozenset(), 0))
        wanted = frozenset(range(start, stop))
        part = segment(name, start, stop - start, salt=salt, generation=version)
        try:
            assert self.writers[writer].append(part)
        except ConflictError:
            assert have & wanted or name in self.finished
            return
        assert not have & wanted
        self.pending[writer, name] = (salt, have | wanted, max(generation, version))

    @rule(writer=WRITERS, name=NAMES)
    def finish(self, writer, name):
        pending = self.pending.pop((writer, name), None)
        try:
            handle = self.writers[writer].finish(name)
        except MissingTrajectoryError:
            assert pending is None
        except ConflictError:
            assert name in self.finished
        else:
            if pending is None:
                # The same handle again; this writer may not yet know that it was removed.
                assert handle in [self.finished.get(name, [None])[0], *self.gone]
                return
            assert name not in self.finished
            self.finished[name] = (handle, *pending)

    @rule(writer=WRITERS, name=NAMES)
    def abandon(self, writer, name):
        self.pending.pop((writer, name), None)
        self.writers[writer].abandon(name)

    @rule(below=st.integers(0, 6))
    def forget(self, below):
        self._removed(self.retention.forget(below), lambda name, generation: generation < below)

    @rule(first=st.integers(0, 6))
    def discard(self, first):
        self._removed(self.retention.discard(first), lambda name, generation: generation >= first)

    @rule(name=NAMES)
    def remove(self, name):
        self._removed(self.retention.remove([name]), lambda other, generation: other == name)

    def _removed(self, removed, is_removed):
        names = {name for name, found in self.finished.items() if is_removed(name, found[3])}
        assert names <= set(removed.trajectories)
        self.gone += [self.finished.pop(name)[0] for name in names]

    @rule(writer=WRITERS)
    def reopen(self, writer):
        self.writers[writer].close()
        self.writers[writer] = DirectoryWriter(self.place, self.options)
        for key in [key for key in self.pending if key[0] == writer]:
            del self.pending[key]

    @rule()
    def reopen_reader(self):
        self.reader.close()
        self.reader, self.retention = DirectoryReader(self.place), DirectoryRetention(self.place)

    @invariant()
    def what_is_finished_is_there_and_right(self):
        seen = self.reader.trajectories()
        assert {name for name, finished in seen.items() if finished} == self.finished.keys()
        for name, (handle, salt, have, generation) in self.finished.items():
            for target in (name, handle):
                wrong, absent = wrong_bytes(self.reader, target, NUM_ROWS, salts=[salt])
                missing = {row for span in absent for row in range(span.start, span.stop)}
                assert not wrong and missing == set(range(NUM_ROWS)) - have
            stat = self.reader.stat(name)
            assert (stat.generation, stat.num_rows, stat.columns) == (generation, max(have) + 1, WIDTHS)

    @invariant()
    def what_is_gone_is_gone(self):
        for handle in self.gone[-3:]:
            try:
                self.reader.read(handle, ["valid"], 0, 1)
            except GoneError:
                continue
            raise AssertionError(f"{handle} was read")

    @invariant()
    def what_is_unfinished_is_one_authors(self):
        for name, finished in self.reader.trajectories().items():
            if not finished:
                # Of a writer that is open or dead; wrong_bytes accepts no mixture of two.
                salts = [str(number) for number in range(self.serial + 1)]
                wrong, _ = wrong_bytes(self.reader, name, NUM_ROWS, salts=salts)
                assert not wrong

    def teardown(self):
        if not hasattr(self, "writers"):
            return
        for writer in self.writers:
            writer.flush()
        for (writer, name), (salt, have, _) in list(self.pending.items()):
            if name not in self.finished:
                handle = self.writers[writer].finish(name)
                wrong, absent = wrong_bytes(self.reader, handle, NUM_ROWS, salts=[salt])
                assert not wrong
                assert {row for span in absent for row in range(span.start, span.stop)} == set(
                    range(NUM_ROWS)
                ) - have
                self.finished[name] = (handle, salt, have, 0)
        for writer in self.writers:
            writer.close()
        report = check_store(self.place)
        assert report.is_intact and report.num_finished == len(self.finished)
        self.reader.close()
        shutil.rmtree(self.place)


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestStore = StoreMachine.TestCase


@pytest.mark.slow
def test_many_more_orders_of_events():
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
