"""Faults in the record store: torn and damaged bytes taken for good, losses not named, deletions beside readers."""

from tests.mutants.mutation import Mutation

_ROOM = "src/tracefp4/store/"
_TESTS = "tests/store/"

READING = (
    Mutation(
        name="column_digest_not_checked",
        fault="A column whose bytes changed on the disk is given out.",
        path=_ROOM + "reader.py",
        old="if len(part) == size and head.is_intact(column, part):",
        new="if len(part) == size:",
        tests=(
            _TESTS
            + "test_faults_damage.py::test_a_bit_flipped_anywhere_in_a_chunk_loses_what_it_hits_and_nothing_else",
        ),
    ),
    Mutation(
        name="frame_digest_not_checked",
        fault="The head of a frame is believed although its bytes changed.",
        path=_ROOM + "frames.py",
        old="if len(head) < size or _digest(identity, offset, data[: _LENGTHS.size], head) != expected:",
        new="if len(head) < size:",
        tests=(_TESTS + "test_frames.py::test_any_damage_loses_the_frames_that_it_hits_and_no_others",),
    ),
    Mutation(
        name="frame_digest_without_place",
        fault="A frame that was copied from elsewhere is taken for one of this file.",
        path=_ROOM + "frames.py",
        old="digest = hashlib.blake2b(salt + lengths, digest_size=CHECKSUM_BYTES)",
        new="digest = hashlib.blake2b(lengths, digest_size=CHECKSUM_BYTES)",
        tests=(_TESTS + "test_frames.py::test_a_body_that_looks_like_frames_is_no_frame",),
    ),
    Mutation(
        name="torn_body_taken",
        fault="A frame whose body is not there yet counts as complete.",
        path=_ROOM + "frames.py",
        old="return frame if os.fstat(descriptor).st_size >= frame.end else None",
        new="return frame",
        tests=(_TESTS + "test_frames.py::test_a_frame_whose_end_is_not_there_yet_is_found_when_it_is",),
    ),
    Mutation(
        name="slow_writer_taken_for_damage",
        fault="A frame that was completed during the search for a later one is reported as damage and skipped.",
        path=_ROOM + "frames.py",
        old="            frame = read_frame(descriptor, identity, offset)\n        if frame is None:\n"
        "            frame = later",
        new="        if frame is None:\n            frame = later",
        tests=(_TESTS + "test_frames.py::test_frames_completed_during_a_search_are_no_damage",),
    ),
    Mutation(
        name="absent_rows_not_named",
        fault="Rows that nobody wrote come back as zeros without a word.",
        path=_ROOM + "assembly.py",
        old="            absent += (span for hole in holes for span in self._named(column, *hole))\n",
        new="",
        tests=("tests/contracts/test_record_store.py::test_absent_rows_are_named_and_never_guessed",),
    ),
    Mutation(
        name="handle_digest_not_compared",
        fault="An old handle reads the trajectory that was written anew under its name.",
        path=_ROOM + "reader.py",
        old="(head is None or checksum(head).hex() != trajectory.digest)",
        new="head is None",
        tests=("tests/contracts/test_record_store.py::test_a_name_written_anew_is_another_trajectory",),
    ),
    Mutation(
        name="deleted_store_remembered",
        fault="A reader goes on with open files of a directory that was deleted and made anew.",
        path=_ROOM + "reader.py",
        old="if self._manifest.store_id != self._store_id:",
        new="if not self._manifest.store_id:",
        tests=(_TESTS + "test_faults_damage.py::test_a_directory_made_anew_is_another_store",),
    ),
    Mutation(
        name="listing_believed",
        fault="A chunk that vanished during a scan is skipped and what later chunks say of it is missed.",
        path=_ROOM + "scanning.py",
        old="        except FileNotFoundError:\n            return False\n",
        new="        except FileNotFoundError:\n            return True\n",
        tests=(
            _TESTS + "test_directory_records.py::test_a_listing_that_misses_a_deleted_chunk_is_made_again",
        ),
    ),
)

WRITING = (
    Mutation(
        name="manifest_before_data",
        fault="A trajectory is complete in the manifest before its segments are synced.",
        path=_ROOM + "writer.py",
        old="            self._log.sync()\n        except BackendError as refusal:",
        new="            pass\n        except BackendError as refusal:",
        tests=(_TESTS + "test_faults_disk.py::test_data_is_synced_before_the_manifest_names_it",),
    ),
    Mutation(
        name="failed_sync_forgotten",
        fault="A sync that failed is tried again and believed.",
        path=_ROOM + "trajectory_log.py",
        old="            self._sync_refusal = disk.refused(chunk.path, error, needed=chunk.size)\n",
        new="            chunk.is_dirty = bool(error)\n",
        tests=(
            _TESTS
            + "test_faults_disk.py::test_a_failed_sync_loses_all_that_it_covered_and_is_not_tried_again",
        ),
    ),
    Mutation(
        name="second_finish_wins",
        fault="A writer that finishes a name second is told that it succeeded.",
        path=_ROOM + "trajectory_log.py",
        old="if written.trajectory in self.manifest.entries:",
        new='if written.trajectory == "":',
        tests=(
            _TESTS
            + "test_faults_disk.py::test_of_two_writers_of_one_name_the_first_to_finish_stays_and_nothing_is_mixed",
        ),
    ),
    Mutation(
        name="lost_segment_not_noticed",
        fault="A segment that the disk refused is skipped and its trajectory finished without it.",
        path=_ROOM + "writer.py",
        old="        except BackendError as refusal:\n            with self._changed:\n"
        "                self._give_up(pending, refusal)\n        finally:",
        new="        except BackendError:\n            pass\n        finally:",
        tests=(
            _TESTS + "test_faults_disk.py::"
            "test_a_write_that_fails_once_loses_the_one_trajectory_that_it_belongs_to",
        ),
    ),
    Mutation(
        name="dropped_part_stays_readable",
        fault="What was written of a trajectory before it was dropped can still be read.",
        path=_ROOM + "writer.py",
        old="                self._log.close_trajectory(job.pending.name)\n",
        new="                pass\n",
        tests=(
            _TESTS
            + "test_faults_disk.py::test_a_dropped_trajectory_is_not_read_even_where_a_part_was_written",
        ),
    ),
    Mutation(
        name="queue_without_bound",
        fault="Segments are queued however many bytes are queued already.",
        path=_ROOM + "writer.py",
        old='if self._counts["bytes_queued"] <= room or pending.refusal is not None:',
        new="if True or pending.refusal is not None:",
        tests=(
            _TESTS + "test_faults_disk.py::test_a_slow_disk_makes_append_wait_within_its_bound_and_counts_it",
        ),
    ),
    Mutation(
        name="callers_view_kept",
        fault="The queue keeps a view of the caller's buffer, which stays alive and may change.",
        path=_ROOM + "protocol.py",
        old="columns = {name: bytes(data) for name, data in self.columns.items()}",
        new="columns = dict(self.columns)",
        tests=(_TESTS + "test_directory_records.py::test_res_1_nothing_of_the_callers_buffer_stays_alive",),
    ),
    Mutation(
        name="rows_appended_twice",
        fault="Rows that overlap earlier ones are taken.",
        path=_ROOM + "pending.py",
        old="if start < segment.stop and segment.start < stop and columns & earlier:",
        new="if start < segment.stop and segment.start < stop and columns == earlier == 0:",
        tests=("tests/contracts/test_record_store.py::test_the_same_rows_twice_are_refused",),
    ),
)

FAILING = (
    Mutation(
        name="dead_writer_names_nothing",
        fault="A writer whose thread ended counts and names nothing of what it held.",
        path=_ROOM + "writer.py",
        old="                self._give_up(pending, broken)\n",
        new="                pass\n",
        tests=(_TESTS + "test_faults_threads.py::test_a_writer_whose_thread_ends_names_what_it_held",),
    ),
    Mutation(
        name="cancelled_finish_stops_the_writer",
        fault="A caller that cancels a finish ends the thread that would have answered it.",
        path=_ROOM + "pending.py",
        old="    future.set_running_or_notify_cancel()\n",
        new="",
        tests=(
            _TESTS + "test_faults_threads.py::test_a_finish_that_nobody_waits_for_does_not_stop_the_writer",
        ),
    ),
    Mutation(
        name="failed_opening_keeps_its_writer",
        fault="A store whose reader cannot be opened leaves its writer running.",
        path=_ROOM + "backends.py",
        old="        writer = DirectoryWriter(path, options)\n        opened.callback(writer.close)\n",
        new="        writer = DirectoryWriter(path, options)\n",
        tests=(_TESTS + "test_faults_threads.py::test_an_opening_that_fails_leaves_no_writer",),
    ),
)

REMOVING = (
    Mutation(
        name="unseen_chunk_deleted",
        fault="Retention deletes a chunk that was begun and ended after its scan.",
        path=_ROOM + "retention.py",
        old="num_bytes = self._delete_chunks(numbers)",
        new="num_bytes = self._delete_chunks(chunk_numbers(self.directory))",
        tests=(
            _TESTS
            + "test_directory_records.py::test_a_chunk_that_is_begun_and_ended_while_retention_looks_is_kept",
        ),
    ),
    Mutation(
        name="running_writers_rows_removed",
        fault="Retention removes what a running writer has not finished.",
        path=_ROOM + "retention.py",
        old="                and not self._is_running(writer)\n",
        new="",
        tests=(
            _TESTS
            + "test_directory_records.py::"
            + "test_what_a_running_writer_has_not_finished_is_kept_and_what_a_dead_one_left_goes",
        ),
    ),
    Mutation(
        name="prefetch_without_bound",
        fault="Batches are read however much is held already.",
        path=_ROOM + "prefetch.py",
        old="lambda: self._held + needed <= self.max_bytes or",
        new="lambda: True or",
        tests=(_TESTS + "test_prefetch.py::test_what_is_read_and_not_taken_stays_within_the_bound",),
    ),
)

MUTATIONS = (*READING, *WRITING, *FAILING, *REMOVING)
