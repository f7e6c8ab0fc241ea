"""Faults in the trainer's passes: recomputation, packing, compiled arithmetic, tokens that are not trained, and partial
rollouts."""

from tests.mutants.mutation import Mutation

_RL = "src/tracefp4/rl/"
_QAT = "src/tracefp4/qat/"
_PACKED = "tests/rl/test_packed_trainer.py::"
_PARTIAL = "tests/rl/test_partial.py::"
_EVERY_POSITION = _PARTIAL + "test_ver_1_every_position_is_what_the_weights_of_its_version_computed"
_SAME_DRAWS = _PARTIAL + "test_without_an_update_the_draws_are_those_of_whole_rollouts"
_STOPPED = _PARTIAL + "test_a_stopped_run_goes_on_with_its_suspended_completions"
_WAITS = _PARTIAL + "test_a_step_waits_for_groups_that_would_be_too_old_after_it"
_ENOUGH = _PARTIAL + "test_a_step_ends_when_enough_groups_are_complete_and_takes_the_oldest"
_MODES = "tests/parity/test_modes.py::"
_REFUSED = "tests/rl/test_trainer.py::test_numbers_that_are_not_finite_are_refused_before_a_weight_moves"

RECOMPUTATION = (
    Mutation(
        name="layers_ask_the_running_session",
        fault="A recomputed layer rounds as the pass that runs around it, or to nearest where none does.",
        path=_QAT + "recomputation.py",
        old="with resumed(kwargs.pop(SESSION_ARGUMENT)):",
        new="if kwargs.pop(SESSION_ARGUMENT) is not self:",
        tests=(
            _MODES + "test_rpl_1_recomputation_sees_the_session_of_its_own_forward[reentrant-outside-padded]",
        ),
    ),
    Mutation(
        name="a_model_without_layers_carries_nothing",
        fault="No layer gets a session, and nobody is told.",
        path=_QAT + "recomputation.py",
        old="if not layers or not decoders:",
        new="if False:",
        tests=(
            "tests/qat/test_recomputation.py::test_a_model_without_decoder_layers_is_refused_and_left_alone",
        ),
    ),
    Mutation(
        name="a_session_is_left_behind",
        fault="After a layer the session of its forward stays current.",
        path="src/tracefp4/guidance/session.py",
        old="    token = _SESSION.set(session)\n    try:\n        yield\n    finally:\n        _SESSION.reset(token)\n",
        new="    _SESSION.set(session)\n    yield\n",
        tests=("tests/qat/test_recomputation.py::test_a_resumed_session_gives_way_to_the_one_before",),
    ),
    Mutation(
        name="checkpointing_asked_for_and_not_used",
        fault="The model stays in eval mode, in which transformers recomputes nothing.",
        path=_RL + "opening.py",
        old="        policy.model.train()\n",
        new="",
        tests=("tests/rl/test_trainer.py::test_activation_checkpointing_changes_no_gradient",),
    ),
    Mutation(
        name="experts_traced_by_a_compiler",
        fault="A compiler traces experts and keeps the session of the pass that it saw.",
        path=_QAT + "experts.py",
        old="register(EXPERTS_NAME, opaque(experts_forward))",
        new="register(EXPERTS_NAME, experts_forward)",
        tests=("tests/parity/test_compiled.py::test_a_compiled_trainer_decides_the_same",),
    ),
    Mutation(
        name="compiled_ties_to_odd",
        fault="Compiled rounding to bf16 takes the odd neighbour at a tie.",
        path="src/tracefp4/formats/arithmetic.py",
        old="(((bits >> 16) & 1) + 0x7FFF)",
        new="(0x8000 - ((bits >> 16) & 1))",
        tests=("tests/formats/test_arithmetic.py::test_compiled_rounding_is_the_rounding",),
    ),
    Mutation(
        name="compiled_rounding_looks_at_values",
        fault="Compiled rounding asks whether anything overflowed, which breaks every graph.",
        path="src/tracefp4/formats/arithmetic.py",
        old="if torch.compiler.is_compiling() or not bool(",
        new="if not bool(",
        tests=("tests/formats/test_arithmetic.py::test_compiled_rounding_of_float64_asks_no_values",),
    ),
)

PACKING = (
    Mutation(
        name="labels_cross_borders",
        fault="The first token of a packed sample is predicted by the last one of the sample before it.",
        path=_RL + "packing.py",
        old="return self.positions > 0",
        new="return torch.arange(self.positions.shape[1], device=self.positions.device)[None] > 0",
        tests=("tests/rl/test_packing.py::test_pad_3_labels_do_not_cross_the_border_of_packed_samples",),
    ),
    Mutation(
        name="one_record_for_a_packed_row",
        fault="Every token of a packed row follows the record of the first sample.",
        path=_RL + "trainer.py",
        old="record_index=None if row is None else row.record_index,",
        new="record_index=None if row is None else torch.zeros_like(row.record_index),",
        tests=(_PACKED + "test_pad_3_packed_log_probs_are_those_of_padded_samples",),
    ),
    Mutation(
        name="positions_run_on_in_a_packed_row",
        fault="Positions count the tokens of the row and not those of the sample.",
        path=_RL + "packing.py",
        old="positions=batch.positions.reshape(-1)[places][None],",
        new="positions=torch.arange(places.numel(), device=places.device)[None],",
        tests=("tests/rl/test_packing.py::test_a_packed_row_is_the_tokens_of_every_sample_in_order",),
    ),
    Mutation(
        name="segments_passed_on_and_not_used",
        fault="Packed rows attend over the whole row, where bf16 is emulated.",
        path=_QAT + "attention.py",
        old="    elif segment_lengths is None:\n",
        new="    elif segment_lengths is None or attention_mask is None:\n",
        tests=("tests/qat/test_attention.py::test_pad_3_segments_attend_within_themselves",),
    ),
    Mutation(
        name="native_segments_passed_on_and_not_used",
        fault="Packed rows attend over the whole row, in native arithmetic.",
        path=_QAT + "attention.py",
        old="    if segment_lengths is None:\n",
        new="    if segment_lengths is None or mask is None:\n",
        tests=("tests/qat/test_attention.py::test_native_segments_are_their_own_rows_forward_and_backward",),
    ),
    Mutation(
        name="packed_budget_counts_padding",
        fault="A packed micro-batch is filled only up to the size that its padded one would have.",
        path=_RL + "trainer.py",
        old="            return packed_micro_batches(lengths, max_tokens=self.micro_batch_tokens)\n",
        new="            pass\n",
        tests=(_PACKED + "test_a_packed_row_computes_no_padding",),
    ),
)

ALARMS = (
    Mutation(
        name="no_trainer_tells_the_alarm",
        fault="Values outgrow a static scale and nobody is told.",
        path=_RL + "trainer.py",
        old="self.alarm.hear(following)",
        new="self.alarm.hear(Following())",
        tests=("tests/rl/test_alarms.py::test_rft_5_a_run_whose_keys_outgrow_their_exponent_is_told",),
    ),
    Mutation(
        name="one_share_over_all_sites",
        fault="A site that saturates hides among those that do not, and all are named with it.",
        path=_RL + "following.py",
        old="{site: self.clamped[site] / blocks for",
        new="{site: self.clamped.total() / self.blocks.total() for",
        tests=("tests/rl/test_alarms.py::test_rft_5_a_run_whose_keys_outgrow_their_exponent_is_told",),
    ),
)

TRAINED = (
    Mutation(
        name="the_environments_tokens_are_trained",
        fault="The loss takes the whole completion, a tool's answer too.",
        path=_RL + "batching.py",
        old='loss_mask[row, completion] = torch.tensor(sample.trained_flags, dtype=torch.bool, device="cpu")',
        new="loss_mask[row, completion] = True",
        tests=("tests/rl/test_batching.py::test_tokens_of_the_environment_are_inputs_and_never_trained",),
    ),
    Mutation(
        name="the_environments_tokens_are_measured",
        fault="Mismatch is taken over all completion tokens, against log-probs that nobody gave.",
        path=_RL + "update.py",
        old='return rollout, _padded([torch.tensor(sample.trained_flags, device="cpu") for sample in samples]).bool()',
        new="return rollout, _padded([torch.ones(len(sample.token_ids)) for sample in samples]).bool()",
        tests=("tests/rl/test_trainer.py::test_tokens_of_the_environment_enter_neither_loss_nor_metrics",),
    ),
    Mutation(
        name="untrained_tokens_keep_a_version",
        fault="A tool's answer is a token of version 0, and its sample too old at once.",
        path=_RL + "samples.py",
        old="for version, is_trained in sampled if is_trained)",
        new="for version, is_trained in sampled)",
        tests=("tests/rl/test_samples.py::test_ver_1_the_lag_of_a_sample_is_that_of_its_trained_tokens",),
    ),
    Mutation(
        name="followed_share_one_position_late",
        fault="A token's own row is taken for the one that its logits came from.",
        path=_RL + "update.py",
        old="start=len(sample.prompt_ids) - 1)",
        new="start=len(sample.prompt_ids))",
        tests=(
            "tests/rl/test_update.py::test_ver_1_a_sample_of_several_versions_is_reported_token_by_token",
        ),
    ),
    Mutation(
        name="refused_update_leaves_its_gradients",
        fault="An update adds to the gradients of one that was refused.",
        path=_RL + "trainer.py",
        old="        self.optimizer.forget_gradients()  # of an update that ended in an error\n",
        new="",
        tests=(_REFUSED,),
    ),
    Mutation(
        name="losses_of_any_numbers",
        fault="Numbers that are not finite train the weights.",
        path=_RL + "losses.py",
        old="        if any(read[: len(self.operands)]):\n",
        new="        if False:\n",
        tests=(_REFUSED,),
    ),
)

PARTIAL = (
    Mutation(
        name="suspended_keys_and_values_computed_again",
        fault="The record of a suspended completion gets K and V that its first tokens never read.",
        path=_RL + "partial.py",
        old="replace(params, n=1, max_tokens=left))",
        new="replace(params, n=1, max_tokens=left), recompute=True)",
        tests=(_EVERY_POSITION,),
    ),
    Mutation(
        name="suspended_completions_draw_with_a_new_seed",
        fault="A completion that goes on draws what no uninterrupted one would.",
        path=_RL + "partial.py",
        old="params = replace(params, seed=group.seed)",
        new="params = replace(params)",
        tests=(_ENOUGH, _SAME_DRAWS),
    ),
    Mutation(
        name="suspended_completions_start_their_limit_again",
        fault="max_tokens counts from the last suspension on.",
        path=_RL + "partial.py",
        old="left = params.max_tokens - len(completion.token_ids)",
        new="left = params.max_tokens",
        tests=(_ENOUGH, _SAME_DRAWS),
    ),
    Mutation(
        name="groups_get_too_old",
        fault="A step does not wait for a group that is too old at the next one, and all of it is dropped.",
        path=_RL + "partial.py",
        old="and all(group.is_complete for group in due)",
        new="and bool(due is not None)",
        tests=(_WAITS,),
    ),
    Mutation(
        name="groups_are_waited_for_one_version_late",
        fault="max_version_diff versions and one more.",
        path=_RL + "partial.py",
        old="self._engine.weight_version - oldest >= self._max_lag",
        new="self._engine.weight_version - oldest > self._max_lag",
        tests=(_WAITS,),
    ),
    Mutation(
        name="newest_groups_are_trained_first",
        fault="Groups that waited go on waiting.",
        path=_RL + "partial.py",
        old="return oldest, group.task.index",
        new="return -oldest, -group.task.index",
        tests=(_ENOUGH, _WAITS),
    ),
    Mutation(
        name="groups_of_a_checkpoint_are_forgotten",
        fault="A resumed run begins new prompts in place of those under way.",
        path=_RL + "opening.py",
        old="encode=lambda task: encode(task, tokenizer=tokenizer), groups=groups",
        new="encode=lambda task: encode(task, tokenizer=tokenizer), groups=groups[:0]",
        tests=(_STOPPED,),
    ),
    Mutation(
        name="noise_is_measured_on_older_positions",
        fault="What the weights have moved counts as noise, and widens the gate.",
        path=_RL + "rollouts.py",
        old="if sample.version_lag(version) == 0",
        new="if sample.version_lag(version) >= 0",
        tests=(_PARTIAL + "test_agreement_is_measured_where_engine_and_trainer_held_the_same_weights",),
    ),
    Mutation(
        name="a_completion_has_the_version_of_its_end",
        fault="A completion over two versions counts as fresh.",
        path=_RL + "samples.py",
        old="return max((current_version - version for",
        new="return min((current_version - version for",
        tests=(
            _PARTIAL + "test_the_run_trains_on_every_version_and_says_so",
            "tests/rl/test_samples.py::test_ver_1_the_lag_of_a_sample_is_that_of_its_trained_tokens",
        ),
    ),
)

NATIVE = (
    Mutation(
        name="copies_outlive_their_promise",
        fault="FP4 copies whose bits nobody looks at are served after somebody has written the weights.",
        path=_QAT + "experts.py",
        old="            state.forget()\n            state.is_steady = False",
        new="            state.is_steady = False",
        tests=(
            "tests/qat/test_experts.py::test_copies_of_steady_weights_live_inside_and_are_told_by_the_version",
        ),
    ),
    Mutation(
        name="native_attention_sees_the_future",
        fault="In bf16 every token attends to the ones after it.",
        path=_QAT + "attention.py",
        old="is_causal=mask is None,",
        new="is_causal=False,",
        tests=(
            "tests/qat/test_attention.py::"
            "test_native_attention_is_the_emulated_one_with_the_roundings_of_bf16",
        ),
    ),
    Mutation(
        name="segments_in_the_order_of_their_groups",
        fault="Results of a packed row come back sorted by length.",
        path=_QAT + "attention.py",
        old="torch.cat(found, dim=1).index_select(1, inverse)",
        new="torch.cat(found, dim=1)[:, : inverse.numel()]",
        tests=("tests/qat/test_attention.py::test_native_segments_are_their_own_rows_forward_and_backward",),
    ),
    Mutation(
        name="host_states_are_not_clipped",
        fault="With masters in host memory the gradient's norm has no limit.",
        path=_RL + "optimizer_states.py",
        old="[copy.grad.to(master.dtype).mul_(scale)]",
        new="[copy.grad.to(master.dtype)]",
        tests=(
            "tests/rl/test_optimizer_states.py::"
            "test_states_in_host_memory_give_the_weights_of_states_on_the_device",
        ),
    ),
)

MUTATIONS: tuple[Mutation, ...] = (*RECOMPUTATION, *PACKING, *ALARMS, *TRAINED, *PARTIAL, *NATIVE)
