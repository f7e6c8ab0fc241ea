"""Faults in how records travel: columns, messages, server and clients, shared memory, and the run's use of a store."""

from tests.mutants.mutation import Mutation

_STORE = "src/tracefp4/store/"
_RL = "src/tracefp4/rl/"
_COLUMNS = "src/tracefp4/guidance/columns.py"
_REMOTE = "tests/store/test_remote.py::"
_SESSIONS = "tests/store/test_sessions.py::"
_SHARED = "tests/store/test_shared_memory.py::"
_RECORDS = "tests/rl/test_records.py::"

COLUMNS = (
    Mutation(
        name="missing_positions_valid",
        fault="A position that a column lacks is followed as if its bytes, zeros, had been recorded.",
        path=_COLUMNS,
        old="valid=valid & ~lost,",
        new="valid=valid,",
        tests=("tests/guidance/test_columns.py::test_missing_positions_are_not_valid_and_look_no_older",),
    ),
    Mutation(
        name="missing_positions_look_old",
        fault="A lost version reads as version 0, and the whole sample is dropped as stale.",
        path=_COLUMNS,
        old="versions.masked_fill(lost, _newest(versions, lost))",
        new="versions",
        tests=("tests/guidance/test_columns.py::test_missing_positions_are_not_valid_and_look_no_older",),
    ),
    Mutation(
        name="columns_alias_the_buffer",
        fault="A record that was read shares memory with the buffer it came in.",
        path=_COLUMNS,
        old="torch.frombuffer(bytearray(data), dtype=dtype)",
        new="torch.frombuffer(data, dtype=dtype)",
        tests=("tests/guidance/test_columns.py::test_res_1_a_record_read_back_owns_its_memory",),
    ),
)
MESSAGES = (
    Mutation(
        name="message_digest_not_checked",
        fault="A message whose bytes changed on the way is believed.",
        path=_STORE + "wire.py",
        old="if _digest(text, body) != digest:",
        new="if False:",
        tests=("tests/store/test_wire.py::test_every_flipped_bit_is_refused",),
    ),
    Mutation(
        name="repeated_request_done_twice",
        fault="A request that comes again because its answer was lost is done a second time.",
        path=_STORE + "server.py",
        old="if seq == session.last_seq and session.answer is not None:",
        new="if False:",
        tests=(_REMOTE + "test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice",),
    ),
    Mutation(
        name="busy_server_counts_as_dead",
        fault="A client gives a server up that is still working.",
        path=_STORE + "server.py",
        old='"busy": True',
        new='"lazy": True',
        tests=(_REMOTE + "test_a_slow_server_is_waited_for",),
    ),
    Mutation(
        name="silent_client_keeps_its_names",
        fault="What a client that is gone had begun stays open for ever.",
        path=_STORE + "server.py",
        old="failed = self._requests.forget_session(session.unfinished)",
        new="failed = self._requests.forget_session(())",
        tests=(_SESSIONS + "test_a_client_that_was_silent_for_too_long_is_told_so",),
    ),
    Mutation(
        name="restart_not_noticed",
        fault="After a restart of the server a trajectory is finished without the rows that the old server held.",
        path=_STORE + "remote_writer.py",
        old="self._give_up(lost, error)",
        new="pass",
        tests=(_SESSIONS + "test_a_server_started_anew_costs_only_what_it_held",),
    ),
    Mutation(
        name="unreachable_server_taken_for_the_same",
        fault="What had begun before a server could not be reached goes on as if the server had kept it.",
        path=_STORE + "remote_writer.py",
        old="return self._settle(jobs, error, lost=set(self._begun))",
        new="return self._settle(jobs, error)",
        tests=(_REMOTE + "test_a_killed_server_loses_what_was_unfinished_and_says_so",),
    ),
    Mutation(
        name="two_clients_one_trajectory",
        fault="Rows of two clients end up in one trajectory.",
        path=_STORE + "requests.py",
        old='        if owner != session:\n            raise ConflictError(\n                f"Trajectory {segment',
        new='        if False:\n            raise ConflictError(\n                f"Trajectory {segment',
        tests=(_REMOTE + "test_two_clients_never_mix_rows_under_one_name",),
    ),
    Mutation(
        name="any_frame_size",
        fault="A frame of any size is taken into memory before it is looked at.",
        path=_STORE + "server.py",
        old="socket.setsockopt(zmq.MAXMSGSIZE, max(self.limits.message_bytes, FRAME_OVERHEAD))",
        new="pass",
        tests=(_REMOTE + "test_an_oversized_frame_never_reaches_memory",),
    ),
)
SERVING = (
    Mutation(
        name="closed_client_keeps_its_place",
        fault="The place of a client that closed stays taken until it counts as silent.",
        path=_STORE + "sessions.py",
        old="(session.is_leaving or session.heard <= last)",
        new="session.heard <= last",
        tests=(_SESSIONS + "test_a_client_that_closes_frees_its_place_at_once",),
    ),
    Mutation(
        name="idle_client_loses_its_next_trajectory",
        fault="A client that a server forgot loses what it sends next although the server held nothing of it.",
        path=_STORE + "remote_writer.py",
        old="lost = self._sender.forgotten() & self._begun",
        new="lost = self._sender.forgotten() | self._begun",
        tests=(_SESSIONS + "test_an_idle_client_with_nothing_unfinished_loses_nothing",),
    ),
    Mutation(
        name="rows_that_a_server_held_forgotten",
        fault="The rows before a silence are missing from a trajectory that is finished after it.",
        path=_STORE + "sending.py",
        old="            self._held.add(segment.trajectory)\n",
        new="",
        tests=(_SESSIONS + "test_what_is_lost_to_silence_is_lost_as_a_whole",),
    ),
    Mutation(
        name="answer_names_all_that_was_removed",
        fault="A rule that removes very many trajectories fails after they are gone.",
        path=_STORE + "wire.py",
        old="trajectories=removed.trajectories[:NAMES_PER_MESSAGE]",
        new="trajectories=removed.trajectories",
        tests=(_SESSIONS + "test_a_rule_that_removes_very_many_names_the_first_and_counts_all",),
    ),
    Mutation(
        name="names_to_remove_in_one_message",
        fault="Names to remove travel in one message however many there are.",
        path=_STORE + "remote.py",
        old="range(0, max(1, len(names)), NAMES_PER_MESSAGE)",
        new="range(0, 1)",
        tests=(_SESSIONS + "test_any_number_of_names_is_removed_and_the_answer_fits_a_message",),
    ),
    Mutation(
        name="failed_abandon_not_reported",
        fault="What a broken local writer could not give up of a client that is gone is not said.",
        path=_STORE + "requests.py",
        old="                failed[name] = error\n",
        new="                del error\n",
        tests=(_SESSIONS + "test_a_store_that_cannot_give_up_does_not_end_the_server",),
    ),
    Mutation(
        name="one_fault_ends_the_server",
        fault="A fault at one message ends the thread that serves everybody.",
        path=_STORE + "server.py",
        old='                self._fault(f"The store server at {self.address} failed at a message: {error!r}.")\n',
        new="                raise error\n",
        tests=(_SESSIONS + "test_a_fault_of_the_server_at_one_message_ends_nothing",),
    ),
    Mutation(
        name="one_fault_ends_the_sending_thread",
        fault="An error that nobody foresaw ends the thread that sends; whoever waits for it waits for ever.",
        path=_STORE + "remote_writer.py",
        old="            except Exception as error:\n                odd",
        new="            except KeyError as error:\n                odd",
        tests=(_SESSIONS + "test_a_sending_thread_outlives_whatever_happens_to_one_request",),
    ),
    Mutation(
        name="every_client_let_in",
        fault="A client that knows the public half of a key is let in with a secret of its own.",
        path=_STORE + "server.py",
        old='b"200" if is_known else b"400"',
        new='b"200"',
        tests=("tests/store/test_keys.py::test_nobody_else_gets_as_far_as_a_message",),
    ),
    Mutation(
        name="public_address_without_key",
        fault="A server listens for other hosts and asks nobody for a key.",
        path=_STORE + "server.py",
        old="if key is None and not bind.startswith(_LOOPBACK):",
        new='if key is None and bind == "":',
        tests=("tests/store/test_keys.py::test_an_address_that_others_reach_needs_a_key",),
    ),
)
MEMORY = (
    Mutation(
        name="capacity_not_kept",
        fault="Shared memory grows to twice what it was given.",
        path=_STORE + "shared_memory.py",
        old="+ num_bytes > capacity:",
        new="+ num_bytes > 2 * capacity:",
        tests=(_SHARED + "test_the_capacity_is_kept_and_whole_trajectories_are_dropped",),
    ),
    Mutation(
        name="part_of_a_dropped_trajectory",
        fault="A trajectory whose later rows found no room is kept in part.",
        path=_STORE + "shared_memory.py",
        old="if self._writer.give_up(name, refusal):",
        new="if False:",
        tests=(_SHARED + "test_a_trajectory_that_no_longer_fits_is_dropped_as_a_whole",),
    ),
    Mutation(
        name="memory_of_the_living_removed",
        fault="Opening shared memory removes what another run is using.",
        path=_STORE + "shared_memory.py",
        old="if _try_lock(users, fcntl.LOCK_EX) and _is_at(users, path / USERS):",
        new="if True:",
        tests=(_SHARED + "test_res_4_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not",),
    ),
    Mutation(
        name="leftovers_of_the_same_name",
        fault="A run that starts again finds the trajectories of the one that was killed.",
        path=_STORE + "shared_memory.py",
        old="                _clear(self.path)\n",
        new="                pass\n",
        tests=(_SHARED + "test_res_4_a_restart_under_the_same_name_begins_empty",),
    ),
    Mutation(
        name="deleted_chunks_held",
        fault="A reader holds the memory of chunks that retention deleted.",
        path=_STORE + "reader.py",
        old="st_nlink == 0]",
        new="st_nlink < 0]",
        tests=(_SHARED + "test_memory_of_removed_records_is_not_held_by_a_reader",),
    ),
)
RUNS = (
    Mutation(
        name="lost_spans_followed",
        fault="The trainer follows rows that the store could not give.",
        path=_RL + "fetching.py",
        old="missing=absent)",
        new="missing=())",
        tests=(_RECORDS + "test_lif_4_a_record_that_was_never_written_is_not_followed_as_zeros",),
    ),
    Mutation(
        name="lost_spans_not_counted",
        fault="Positions without a record are not counted.",
        path=_RL + "fetching.py",
        old="self._missing[sample.trajectory] = _num_covered(absent)",
        new="self._missing[sample.trajectory] = 0",
        tests=(_RECORDS + "test_lif_4_a_record_that_was_never_written_is_not_followed_as_zeros",),
    ),
    Mutation(
        name="read_columns_stay",
        fault="What was read stays attached after it became a record, and memory grows with every step.",
        path=_RL + "fetching.py",
        old="        record = columns_to_record(columns, missing=absent)\n",
        new="        record = columns_to_record(columns, missing=absent)\n"
        "        self.kept = [*getattr(self, 'kept', []), columns]\n",
        tests=(_RECORDS + "test_res_1_memory_does_not_grow_with_the_steps",),
    ),
    Mutation(
        name="handles_count_as_unrecorded",
        fault="The share of recorded tokens by lag is 0 as soon as records are in a store.",
        path=_RL + "update.py",
        old="rows = fetcher.followed_positions(sample)",
        new="rows = set()",
        tests=(_RECORDS + "test_a_run_is_bit_for_bit_the_one_with_records_in_memory",),
    ),
    Mutation(
        name="steps_made_again_stay",
        fault="A resumed run finds the records of steps that it is about to make again.",
        path=_RL + "records.py",
        old="int(step) >= first_step",
        new="int(step) > first_step",
        tests=(_RECORDS + "test_ckp_1_steps_that_will_be_made_again_leave_finished_or_not",),
    ),
    Mutation(
        name="anothers_records_removed",
        fault="A run removes the records of another run that shares its store.",
        path=_RL + "records.py",
        old="if name.startswith(retention.prefix)",
        new="if True",
        tests=(_RECORDS + "test_runs_that_share_a_store_leave_each_other_alone",),
    ),
    Mutation(
        name="newest_but_n_versions",
        fault="One weight version fewer than asked for stays.",
        path=_RL + "records.py",
        old="generation < below",
        new="generation <= below",
        tests=(_RECORDS + "test_old_versions_leave_and_the_newest_stay",),
    ),
)
MUTATIONS = (*COLUMNS, *MESSAGES, *SERVING, *MEMORY, *RUNS)
