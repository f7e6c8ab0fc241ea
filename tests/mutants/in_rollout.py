"""Faults in an engine's records, pages and prefixes."""

from tests.mutants.mutation import Mutation

_ROLLOUT = "src/tracefp4/rollout/"
_PAGES = "src/tracefp4/kvcache/pages.py"
_PREFIXES = "tests/rollout/test_prefixes.py::"
_RESIDENCE = "tests/rollout/test_residence.py::"
_UPDATES = "tests/rollout/test_updates.py::"
_TURNS = "tests/rollout/test_turns.py::"
_STOPPING = "tests/rollout/test_stopping.py::"
_LOST = _RESIDENCE + "test_lost_pages_come_back_from_whole_codes_bit_for_bit"
_OTHER_CODES = (
    _RESIDENCE + "test_a_recomputation_with_other_codes_is_counted_and_later_tokens_are_not_followed"
)
_FLUSH = _UPDATES + "test_with_recomputation_later_tokens_are_those_of_the_new_weights_alone"
_CUT = _STOPPING + "test_tokens_log_probs_versions_and_record_are_cut_together"

PREFIXES = (
    Mutation(
        name="prefix_serves_the_last_token",
        fault="A prompt that is all cached pages has no token left to compute.",
        path=_ROLLOUT + "prefixes.py",
        old="range(0, len(ids) - self._page_size, self._page_size)",
        new="range(0, len(ids) - self._page_size + 1, self._page_size)",
        tests=(
            _PREFIXES + "test_entries_are_found_behind_the_very_page_they_were_computed_after",
            _PREFIXES + "test_a_prompt_that_is_one_full_page_still_computes_its_last_token",
        ),
    ),
    Mutation(
        name="prefix_without_its_predecessor",
        fault="A page is found by its own tokens, whatever stands before them.",
        path=_ROLLOUT + "prefixes.py",
        old="            predecessor = entry.serial\n",
        new="",
        tests=(_PREFIXES + "test_entries_are_found_behind_the_very_page_they_were_computed_after",),
    ),
    Mutation(
        name="prefix_of_two_versions",
        fault="A page begun before an update and filled after it is offered.",
        path=_ROLLOUT + "prefixes.py",
        old=" or min(versions) < self._oldest_version",
        new=" or max(versions) < self._oldest_version",
        tests=(_PREFIXES + "test_positions_older_than_the_last_update_are_not_entered",),
    ),
    Mutation(
        name="prefix_survives_an_update",
        fault="K and V of old weights serve new requests.",
        path=_ROLLOUT + "engine.py",
        old="if self._prefixes is not None and not keep_prefixes:",
        new="if self._prefixes is not None and keep_prefixes:",
        tests=(_PREFIXES + "test_an_update_empties_the_cache_or_keeps_it_with_its_versions",),
    ),
    Mutation(
        name="prefix_rows_of_the_drawn_tokens",
        fault="After a flush a page is offered with the rows of the passes before it.",
        path=_ROLLOUT + "residence.py",
        old="if first < 0 or begin < len(history.cache_rows):",
        new="if first < 0:",
        tests=(_PREFIXES + "test_pages_that_were_computed_again_are_not_offered",),
    ),
    Mutation(
        name="prefix_shared_by_tokens_alone",
        fault="A trajectory goes on over K and V of another computation of its tokens.",
        path=_ROLLOUT + "residence.py",
        old="if entry.page.frame is None or not self._restorer.holds(record, entry.start, entry.page.frame):",
        new="if entry.page.frame is None:",
        tests=(_PREFIXES + "test_pages_of_another_computation_do_not_serve_a_trajectory",),
    ),
    Mutation(
        name="spare_pages_stay_while_sequences_move_out",
        fault="Pages of resting sequences leave before pages that nobody needs.",
        path=_PAGES,
        old="if not self._free and self._spare:",
        new="if not self._free and self._spare and not self._idle:",
        tests=("tests/kvcache/test_pages.py::test_spare_pages_go_before_idle_ones_the_longest_unused_first",),
    ),
)

PAGES = (
    Mutation(
        name="restored_codes_one_position_off",
        fault="K and V of the next position are written.",
        path=_ROLLOUT + "restoring.py",
        old='rows = torch.tensor(list(positions), device="cpu")',
        new='rows = torch.tensor([max(0, p - 1) for p in positions], device="cpu")',
        tests=(_LOST,),
    ),
    Mutation(
        name="recoded_positions_are_followed",
        fault="Tokens computed from other K and V than recorded are followed.",
        path=_ROLLOUT + "residence.py",
        old="            sequence.follows = False\n",
        new="            pass\n",
        tests=(_OTHER_CODES,),
    ),
    Mutation(
        name="recomputed_codes_replace_the_record",
        fault="A recomputation that should give the recorded codes overwrites them.",
        path=_ROLLOUT + "residence.py",
        old="        if rebuild.replaces:\n",
        new="        if rebuild.replaces or changed:\n",
        tests=(_OTHER_CODES,),
    ),
    Mutation(
        name="flushed_record_keeps_old_keys_and_values",
        fault="Later tokens read new K and V, the record has the old ones.",
        path=_ROLLOUT + "residence.py",
        old="            sequence.history.cache_rows = rebuild.rows\n",
        new="",
        tests=(_FLUSH,),
    ),
    Mutation(
        name="log_sealed_in_the_middle_of_a_recomputation",
        fault="Rows of a recomputation name places of a log that is gone.",
        path=_ROLLOUT + "ledger.py",
        old="if all(sequence.rebuild is None for sequence in known):",
        new="if known:",
        tests=(_UPDATES + "test_a_log_that_is_sealed_while_positions_are_computed_again_loses_none_of_them",),
    ),
    Mutation(
        name="new_rows_begin_with_recomputed_ones",
        fault="A pass that computes old and new positions gives the new ones the rows of the old.",
        path=_ROLLOUT + "residence.py",
        old="first_log_row = None if first_log_row is None else first_log_row + again",
        new="pass",
        tests=(_FLUSH,),
    ),
    Mutation(
        name="cache_keeps_pages_in_host_memory",
        fault="A page that nobody but the prefix cache holds stays in host memory.",
        path=_PAGES,
        old="elif page.is_cached and page.holders == 1 and page.frame is None:",
        new="elif False:",
        tests=(
            "tests/kvcache/test_pages.py::test_a_cached_page_does_not_stay_in_host_memory_for_the_cache_alone",
        ),
    ),
    Mutation(
        name="lost_rows_stay",
        fault="A recomputation that begins again keeps the rows of its first try.",
        path=_ROLLOUT + "sequence.py",
        old="        del self.rebuild.rows[position - self.rebuild.begin :]\n",
        new="",
        tests=(_RESIDENCE + "test_a_sequence_that_rests_in_the_middle_of_a_recomputation_begins_it_again",),
    ),
    Mutation(
        name="finished_samples_come_back",
        fault="An abort during a recomputation forks the samples of the prompt once more.",
        path=_ROLLOUT + "scheduler.py",
        old="if len(found) == 1 and found[0].num_computed < found[0].num_given:",
        new="if len(found) == 1 and not found[0].is_decoding:",
        tests=(_UPDATES + "test_abort_in_the_middle_of_a_recomputation_brings_no_finished_sample_back",),
    ),
    Mutation(
        name="hits_cost_nothing",
        fault="Cached pages that a request takes are counted as available to it.",
        path=_ROLLOUT + "residence.py",
        old="return table.num_frames_to_adopt(pages) + self.num_pages(end) - len(found)",
        new="return self.num_pages(end) - len(pages)",
        tests=(_PREFIXES + "test_pages_that_a_hit_takes_are_no_longer_there_for_others",),
    ),
    Mutation(
        name="host_copy_counted_for_ever",
        fault="Pages that come back from host memory still count against its limit.",
        path=_PAGES,
        old="        self.num_saved -= 1\n        self._load(",
        new="        self._load(",
        tests=("tests/kvcache/test_pages.py::test_a_full_host_memory_loses_pages_and_says_so",),
    ),
)

TRAJECTORIES = (
    Mutation(
        name="turn_computed_from_the_start",
        fault="An earlier turn is computed again although its record is there.",
        path=_ROLLOUT + "sequence.py",
        old="        self.num_computed = record.length\n",
        new="        self.num_computed, self.history.past, self.versions = 0, [], []\n",
        tests=(_TURNS + "test_only_new_positions_are_computed",),
    ),
    Mutation(
        name="versions_one_position_late",
        fault="A token carries the version of the position it was fed to, not of the one it was drawn from.",
        path=_ROLLOUT + "sequence.py",
        old="begin = self.num_given - 1  #",
        new="begin = self.num_given  #",
        tests=(_UPDATES + "test_ver_3_a_request_carries_the_version_that_computed_it",),
    ),
    Mutation(
        name="record_of_removed_tokens",
        fault="Tokens after a stop text go, their rows stay.",
        path=_ROLLOUT + "recorder.py",
        old="return record.truncate(len(sequence.ids) - 1)",
        new="return record",
        tests=(_CUT,),
    ),
    Mutation(
        name="log_probs_of_removed_tokens",
        fault="Tokens after a stop text go, their log-probs stay.",
        path=_ROLLOUT + "sequence.py",
        old="        del self.logprobs[max(0, num_kept - self.num_carried) :]\n",
        new="",
        tests=(_CUT,),
    ),
    Mutation(
        name="stop_text_in_the_newest_token_alone",
        fault="A stop text that spans tokens is not seen.",
        path=_ROLLOUT + "stopping.py",
        old="    count = longest + MARGIN\n",
        new="    count = 1\n    tokens = tokens[-1:]\n",
        tests=(_STOPPING + "test_where_a_completion_ends",),
    ),
    Mutation(
        name="stop_text_since_the_suspension_alone",
        fault="A stop text that began before a completion was suspended is not seen.",
        path=_ROLLOUT + "sequence.py",
        old="            self.num_carried = sum(1 for _ in takewhile(bool, backwards))\n",
        new="            del backwards\n",
        tests=(_STOPPING + "test_a_stop_text_may_begin_before_a_suspension",),
    ),
    Mutation(
        name="unfollowed_turn_is_followed",
        fault="Rows of a second computation pass for those that drew the tokens.",
        path=_ROLLOUT + "sequence.py",
        old="self.follows and p >= self.num_unfollowed",
        new="self.follows",
        tests=(
            _TURNS
            + "test_a_trajectory_without_a_record_is_computed_again_and_its_positions_are_not_followed",
        ),
    ),
    Mutation(
        name="rows_gap_keeps_the_columns_of_who_left",
        fault="The sequence that moves into a gap decodes with another one's token, pages and noise.",
        path=_ROLLOUT + "rows.py",
        old="            self._numbers[row] = self._numbers[len(self.sequences)]\n",
        new="",
        tests=("tests/rollout/test_rows.py::test_rows_hold_what_their_sequences_say_at_every_step",),
    ),
    Mutation(
        name="ring_cuts_long_passes_by_rows",
        fault="A pass of several slots loses rows of sites with several rows a token.",
        path=_ROLLOUT + "ring.py",
        old="part.narrow(1, begin * per_token, count * per_token)",
        new="part.narrow(1, begin, count * per_token)",
        tests=("tests/rollout/test_ring.py::test_passes_arrive_in_order_without_their_padding",),
    ),
    Mutation(
        name="finished_forgotten_before_their_records",
        fault="An error while records are built loses the sequences that had finished.",
        path=_ROLLOUT + "ledger.py",
        old="        records: list[Record | None] = [None] * len(taken)\n",
        new="        self.finished = [s for s in self.finished if s.request.request_id not in request_ids]\n"
        "        records: list[Record | None] = [None] * len(taken)\n",
        tests=(
            "tests/rollout/test_early_end.py::"
            "test_an_error_while_a_record_is_built_loses_no_finished_sequence",
        ),
    ),
    Mutation(
        name="log_outlives_its_requests",
        fault="The log of finished requests is never dropped.",
        path=_ROLLOUT + "ledger.py",
        old="            self._recorder.forget(self._prefixes)\n",
        new="            pass\n",
        tests=(
            "tests/rollout/test_recorder.py::test_the_log_is_dropped_when_nothing_refers_to_it",
            "tests/rollout/test_early_end.py::test_an_error_in_the_predicate_leaves_nothing",
        ),
    ),
)

_AHEAD = "tests/rollout/test_ahead.py::"
_BETWEEN = _AHEAD + "test_what_comes_between_two_steps_drops_the_pass_that_has_begun"

AHEAD = (
    Mutation(
        name="ahead_over_the_last_token",
        fault="A pass starts ahead for a sequence whose last token has just been drawn.",
        path=_ROLLOUT + "rows.py",
        old="else sequence.num_cached + left - 1",
        new="else sequence.num_cached + left",
        tests=(_AHEAD + "test_every_sequence_ends_as_in_the_plain_order",),
    ),
    Mutation(
        name="ahead_after_a_gap",
        fault="A pass starts with the tokens of the pass before, although one of its rows has left.",
        path=_ROLLOUT + "scheduler.py",
        old="computed.rows == self.rows.sequences and ",
        new="",
        tests=(_AHEAD + "test_every_sequence_ends_as_in_the_plain_order",),
    ),
    Mutation(
        name="ahead_with_old_tokens",
        fault="A pass that starts before tokens are known computes those of the pass before.",
        path=_ROLLOUT + "graphs.py",
        old="        if follows:\n",
        new="        if False:\n",
        tests=(_AHEAD + "test_every_sequence_ends_as_in_the_plain_order",),
    ),
    Mutation(
        name="ahead_of_a_gap",
        fault="Tokens of a pass are given to rows by their place, although one of its rows has left.",
        path=_ROLLOUT + "rows.py",
        old="        if sequences != self.sequences:\n",
        new="        if False:\n",
        tests=(_AHEAD + "test_every_sequence_ends_as_in_the_plain_order",),
    ),
    Mutation(
        name="ahead_in_one_place",
        fault="The draws of a pass are written over while the host reads those of the pass before.",
        path=_ROLLOUT + "graphs.py",
        old="        self._places.reverse()\n",
        new="",
        tests=(_AHEAD + "test_every_sequence_ends_as_in_the_plain_order",),
    ),
    Mutation(
        name="ahead_over_an_update",
        fault="A pass that began under the old weights counts as one under the new ones.",
        path=_ROLLOUT + "engine.py",
        old="        self._settle()\n        self._model.weights.load(state)\n",
        new="        self._model.weights.load(state)\n",
        tests=(_BETWEEN,),
    ),
    Mutation(
        name="ahead_of_an_abort",
        fault="A pass that began with an aborted sequence is booked to the rows of the others.",
        path=_ROLLOUT + "engine.py",
        old="        self._settle()\n        self._ledger.finished",
        new="        self._ledger.finished",
        tests=(_BETWEEN,),
    ),
    Mutation(
        name="ahead_of_a_seal",
        fault="The log is sealed while a pass under way names its rows.",
        path=_ROLLOUT + "engine.py",
        old="        if self._ahead is None:  # a pass under way names rows of the log\n            self._ledger",
        new="        if True:\n            self._ledger",
        tests=(_AHEAD + "test_every_sequence_ends_as_in_the_plain_order",),
    ),
)

MUTATIONS = PREFIXES + PAGES + TRAJECTORIES + AHEAD
