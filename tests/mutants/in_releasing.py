"""Faults in giving the memory of pages back between two steps, and in what a run makes of it."""

from tests.mutants.mutation import Mutation

_RELEASING = "src/tracefp4/rollout/releasing.py"
_POOL = "src/tracefp4/kvcache/pool.py"
_RUN = "src/tracefp4/rl/run.py"
_LOOP = "src/tracefp4/rl/loop.py"
_ENGINES = "tests/rollout/test_releasing.py::"
_RUNS = "tests/rl/test_rollout_options.py::"

MUTATIONS = (
    Mutation(
        name="released_captures_stay",
        fault="Captured passes read and write memory that is the trainer's.",
        path=_RELEASING,
        old="    if graphs is not None:\n        graphs.drop()\n",
        new="",
        tests=(_ENGINES + "test_captured_passes_go_with_the_addresses_that_they_read",),
    ),
    Mutation(
        name="released_over_a_pass_under_way",
        fault="A pass that began in the old pages is booked, and its K and V are nowhere.",
        path="src/tracefp4/rollout/engine.py",
        old="        self._settle()\n        release_pool(",
        new="        release_pool(",
        tests=(_ENGINES + "test_unfinished_sequences_move_to_host_memory_and_go_on",),
    ),
    Mutation(
        name="released_without_the_states",
        fault="Layers without pages keep their memory.",
        path=_POOL,
        old="            self.states.give_back()\n",
        new="            pass\n",
        tests=(_ENGINES + "test_states_move_to_host_memory_with_the_pages",),
    ),
    Mutation(
        name="released_and_half_made_again",
        fault="After a failure the pool counts as there, and the next step meets no pages.",
        path=_POOL,
        old="        if self.has_memory:\n            return\n        try:\n",
        new="        if self.has_memory:\n            return\n        self.has_memory = True\n        try:\n",
        tests=(_ENGINES + "test_a_device_without_room_says_so_and_the_next_step_tries_again",),
    ),
    Mutation(
        name="released_prefixes_move_to_host_memory",
        fault="A cache that the next update empties is copied off the device after every rollout.",
        path="src/tracefp4/kvcache/pages.py",
        old="        while self._spare:\n            self.evict(next(iter(self._spare)))\n        while self._idle:\n",
        new="        self._idle |= self._spare\n        self._spare.clear()\n        while self._idle:\n",
        tests=(
            "tests/kvcache/test_pages.py::test_all_frames_are_emptied_as_if_others_needed_them",
            _ENGINES + "test_cached_prefixes_go_and_give_the_same_tokens_and_records_again",
        ),
    ),
    Mutation(
        name="released_by_no_rollout",
        fault="The key is read, and the pool is kept all the same.",
        path=_LOOP,
        old="    )\n    run.rest_engine()\n",
        new="    )\n",
        tests=(_RUNS + "test_a_pool_that_is_given_back_changes_no_weight_and_no_metric",),
    ),
    Mutation(
        name="released_never_after_an_evaluation",
        fault="The pages of an evaluation wait for the garbage collector while the trainer works.",
        path=_LOOP,
        old="    engine.release_pool()  # now, not when Python collects its cycles\n",
        new="",
        tests=(_RUNS + "test_the_memory_of_an_evaluation_and_of_an_engine_that_waits_is_free",),
    ),
    Mutation(
        name="released_is_a_setting_of_results",
        fault="A run that ran out of memory cannot go on with the pool given back.",
        path=_RUN,
        old='    counted["rollout"].pop("keep_pool", None)\n',
        new="",
        tests=(_RUNS + "test_a_run_goes_on_with_the_pool_kept_or_not",),
    ),
)
