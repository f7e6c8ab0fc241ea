"""Faults in how an engine carries the states of layers without pages."""

from tests.mutants.mutation import Mutation

_ROLLOUT = "src/tracefp4/rollout/"
_HYBRIDS = "tests/rollout/test_hybrids.py::"
_COMPANY = _HYBRIDS + "test_company_and_chunks_and_preemption_change_nothing"
_GOES_ON = _HYBRIDS + "test_a_trajectory_goes_on_from_its_record_and_a_state_that_is_made_again"
_LATER = _HYBRIDS + "test_a_later_turn_reads_what_is_recorded_even_under_new_weights"
_LOST = _HYBRIDS + "test_a_page_lost_while_a_state_is_made_again_comes_back_from_the_record"

MUTATIONS = (
    Mutation(
        name="state_of_a_sibling",
        fault="The samples of a prompt go on in one state.",
        path=_ROLLOUT + "residence.py",
        old="states = list(self._states.fork(sequence.state, count))",
        new="states = [sequence.state] * count",
        tests=(_COMPANY,),
    ),
    Mutation(
        name="state_kept_for_lost_pages",
        fault="Positions are computed again on top of a state that has seen them.",
        path=_ROLLOUT + "residence.py",
        old="                self._drop_state(sequence)\n            self._restore",
        new="            self._restore",
        tests=(_HYBRIDS + "test_a_sequence_whose_pages_are_lost_begins_again_with_an_empty_state",),
    ),
    Mutation(
        name="state_cut_back",
        fault="A sequence begins again at its lost page, with the state of no positions.",
        path=_ROLLOUT + "residence.py",
        old="return lost if self._states is None else 0",
        new="return lost",
        tests=(_HYBRIDS + "test_a_sequence_whose_pages_are_lost_begins_again_with_an_empty_state",),
    ),
    Mutation(
        name="state_of_a_trajectory_forgotten",
        fault="A trajectory goes on with recorded K and V and a state of no positions.",
        path=_ROLLOUT + "residence.py",
        old="            sequence.rebuild = Rebuild(begin=0, replaces=False, is_of_state=True)\n",
        new="            sequence.num_cached = sequence.num_computed\n",
        tests=(_GOES_ON,),
    ),
    Mutation(
        name="recorded_pages_written_again",
        fault="Computing a state again writes K and V over the recorded ones.",
        path=_ROLLOUT + "sequence.py",
        old="return max(self.start, self.sequence.num_stored)",
        new="return self.start",
        tests=(_LATER,),
    ),
    Mutation(
        name="pages_under_a_state_not_restored",
        fault="Only the pages of positions whose state is made again already come back from the record.",
        path=_ROLLOUT + "residence.py",
        old="size, end = self.page_size, sequence.num_stored",
        new="size, end = self.page_size, sequence.num_cached",
        tests=(_LOST,),
    ),
    Mutation(
        name="state_moved_by_padding",
        fault="Padding rows of a captured pass move the state in slot 0.",
        path=_ROLLOUT + "rows.py",
        old="row[SLOT], row[STATE], row[FORCED] = NO_SLOT, NO_SLOT, -1",
        new="row[SLOT], row[STATE], row[FORCED] = NO_SLOT, 0, -1",
        tests=(_HYBRIDS + "test_captured_passes_move_states_once",),
    ),
    Mutation(
        name="state_moved_twice",
        fault="A pass started ahead is dropped although the states have moved on with it.",
        path=_ROLLOUT + "engine.py",
        old="if self._ahead is not None and self.pool.states is not None:",
        new="if False:",
        tests=(_HYBRIDS + "test_a_pass_started_ahead_counts_whatever_comes_between",),
    ),
    Mutation(
        name="bytes_of_siblings_shared_too_soon",
        fault="Siblings beyond the free slots get the bytes of a state that has left its slot before.",
        path="src/tracefp4/kvcache/states.py",
        old="        if len(copies) < count and state.slot is not None:\n            saved = self._save(state.slot)\n",
        new="",
        tests=("tests/kvcache/test_states.py::test_a_fork_is_a_copy_in_a_free_slot_or_in_host_memory",),
    ),
    Mutation(
        name="state_of_a_failed_pass",
        fault="A pass that failed is run again on states that it had moved.",
        path=_ROLLOUT + "engine.py",
        old="                self._scheduler.flush()\n            raise\n",
        new="                pass\n            raise\n",
        tests=(_HYBRIDS + "test_states_are_made_again_after_a_pass_that_failed",),
    ),
    Mutation(
        name="state_that_ended_between_two_steps",
        fault="Who ends in a pass that had begun before a pause is told nobody.",
        path=_ROLLOUT + "engine.py",
        old="            self._settled += self._book(",
        new="            self._book(",
        tests=(_HYBRIDS + "test_who_ends_between_two_steps_is_said_by_the_next_one",),
    ),
)
