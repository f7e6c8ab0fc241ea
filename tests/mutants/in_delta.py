"""Faults in gated delta layers: the rule, its kernels, and the states of sequences."""

from tests.mutants.mutation import Mutation

_OP = "src/tracefp4/ops/gated_delta/"
_DEFINED = "tests/ops/test_gated_delta.py::"
_ON_DEVICE = "tests/ops/test_gated_delta_device.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="delta_rule_reads_before_it_decays",
        fault="What a token corrects is read from the state as it was before the decay.",
        path=_OP + "reference.py",
        old="    delta = (v - sum_over_keys(s * k, unit))",
        new="    delta = (v - sum_over_keys(recurrent[at].to(storage.wide) * k, unit))",
        tests=(_DEFINED + "test_steps_and_prefill_are_what_transformers_computes",),
    ),
    Mutation(
        name="delta_value_heads_take_key_heads_in_turn",
        fault="Neighbouring value heads take different key heads.",
        path=_OP + "reference.py",
        old="    q, k = (x.repeat_interleave(group, dim=1)[:, :, None] for x in (q, k))",
        new="    q, k = (x.repeat(1, group, 1)[:, :, None] for x in (q, k))",
        tests=(_DEFINED + "test_steps_and_prefill_are_what_transformers_computes",),
    ),
    Mutation(
        name="delta_padding_decays_the_state",
        fault="Rows behind the last token of a sequence count.",
        path=_OP + "prefill.py",
        old="    log_decay, beta = (x.masked_fill(~is_token, 0.0) for x in (log_decay, beta))\n",
        new="",
        tests=(_DEFINED + "test_sequences_of_other_lengths_share_a_prefill",),
    ),
    Mutation(
        name="delta_convolution_keeps_the_last_rows_of_a_rectangle",
        fault="The convolution of a short sequence goes on after its padding.",
        path=_OP + "prefill.py",
        old="    last = lengths[:, None] + ",
        new="    last = torch.full_like(lengths, projected.mixed.shape[1])[:, None] + ",
        tests=(_DEFINED + "test_sequences_of_other_lengths_share_a_prefill",),
    ),
    Mutation(
        name="delta_kernel_adds_lanes_in_another_order",
        fault="Sums over keys are added nearest lanes first, so states differ in their last bits.",
        path=_OP + "step.cu",
        old="for (int with = TEAM / 2; with; with /= 2)",
        new="for (int with = 1; with < TEAM; with *= 2)",
        tests=(_ON_DEVICE + "test_states_and_outputs_are_those_of_the_reference",),
    ),
    Mutation(
        name="delta_kernel_takes_the_output_before_the_update",
        fault="The output of a token does not see its own key and value.",
        path=_OP + "step.cu",
        old="        for (int e = 0; e < UNITS * UNIT; e++) s.x[e] += key.x[e] * delta;\n"
        "        float o = sum_over_row(s, query);\n",
        new="        float o = sum_over_row(s, query);\n"
        "        for (int e = 0; e < UNITS * UNIT; e++) s.x[e] += key.x[e] * delta;\n",
        tests=(_ON_DEVICE + "test_states_and_outputs_are_those_of_the_reference",),
    ),
    Mutation(
        name="delta_kernel_norms_before_all_rows_are_there",
        fault="The norm of a head reads rows that other warps have not written.",
        path=_OP + "step.cu",
        old="    __syncthreads();\n",
        new="",
        tests=(_ON_DEVICE + "test_states_and_outputs_are_those_of_the_reference",),
    ),
    Mutation(
        name="delta_kernel_does_not_await_the_later_rows",
        fault="Rows of a state are computed while their copy to shared memory is under way.",
        path=_OP + "step.cu",
        old="        if (p == PASSES / 2) await_copies<0>();\n",
        new="        if (p == PASSES - 1) await_copies<0>();\n",
        tests=(_ON_DEVICE + "test_states_and_outputs_are_those_of_the_reference",),
    ),
    Mutation(
        name="delta_kernel_shares_keys_among_the_wrong_heads",
        fault="Neighbouring blocks of a key head take value heads that lie apart.",
        path=_OP + "step.cu",
        old="head = (int)(blockIdx.y * gridDim.x + blockIdx.x)",
        new="head = (int)(blockIdx.x * gridDim.y + blockIdx.y)",
        tests=(_ON_DEVICE + "test_every_head_and_sequence_has_its_own_place",),
    ),
    Mutation(
        name="delta_kernel_forgets_the_youngest_input",
        fault="The convolution state moves on without the token of this step.",
        path=_OP + "prepare.cu",
        old="            conv[(t - 1) * width + WARP * w] = x[w][t];\n",
        new="            if (t < TAPS - 1) conv[(t - 1) * width + WARP * w] = x[w][t];\n",
        tests=(_ON_DEVICE + "test_states_and_outputs_are_those_of_the_reference",),
    ),
    Mutation(
        name="delta_kernel_writes_the_state_of_another",
        fault="A sequence without a state moves the convolution of slot 0 on.",
        path=_OP + "prepare.cu",
        old="        if (slot >= 0) found = convolve<KEY_DIM / 64>",
        new="        found = convolve<KEY_DIM / 64>",
        tests=(_ON_DEVICE + "test_every_head_and_sequence_has_its_own_place",),
    ),
    Mutation(
        name="hybrid_packed_sequences_share_a_state",
        fault="A packed sequence begins with the state of the one before it.",
        path="src/tracefp4/qat/hybrid.py",
        old="    lengths = list(segment_lengths) if segment_lengths is not None else [x.shape[1]]\n",
        new="    lengths = [x.shape[1]]\n",
        tests=("tests/parity/test_hybrids.py::test_a_sequence_is_the_same_packed_padded_and_alone",),
    ),
    Mutation(
        name="hybrid_block_rounds_once",
        fault="The trainer adds the shared expert to the routed ones without rounding it first.",
        path="src/tracefp4/qat/hybrid.py",
        old="shared = round_bf16_(round_bf16_through(self.shared_expert_gate(x).sigmoid()) * self.shared_expert(x))",
        new="shared = round_bf16_through(self.shared_expert_gate(x).sigmoid()) * self.shared_expert(x)",
        tests=("tests/parity/test_hybrids.py::test_trainer_and_engine_are_equal_bit_for_bit",),
    ),
    Mutation(
        name="hybrid_gate_is_taken_from_the_wrong_half",
        fault="The first half of the heads' rows are queries, the rest gates.",
        path="src/tracefp4/models/qwen3_5_moe.py",
        old="        q, gate = q[:, ::2], q[:, 1::2]\n",
        new="        q, gate = q.chunk(2, dim=1)\n",
        tests=("tests/models/test_qwen3_5_moe.py::test_equals_transformers_when_nothing_is_rounded",),
    ),
    Mutation(
        name="state_of_a_new_sequence_is_what_was_there",
        fault="A sequence begins with the state of the one that had its slot.",
        path="src/tracefp4/kvcache/states.py",
        old="            part[:, slot] = 0\n",
        new="            pass\n",
        tests=("tests/kvcache/test_states.py::test_a_new_state_is_zero_whoever_had_the_slot",),
    ),
    Mutation(
        name="state_that_moved_out_is_written_by_its_sibling",
        fault="Bytes in host memory are a view of the slot that someone else has now.",
        path="src/tracefp4/kvcache/states.py",
        old='.to("cpu", copy=True)',
        new='.to("cpu")',
        tests=(
            "tests/kvcache/test_states.py::test_a_state_comes_back_with_its_bytes_whether_it_had_to_leave_or_not",
        ),
    ),
    Mutation(
        name="norm_under_a_float32_weight_is_rounded_twice",
        fault="A norm rounds to bf16 before it multiplies by 1 + w.",
        path="src/tracefp4/ops/norms.py",
        old="    return (normed.to(weight.dtype) * weight).to(torch.bfloat16)\n",
        new="    return (normed.to(torch.bfloat16) * weight).to(torch.bfloat16)\n",
        tests=("tests/ops/test_rms_norm.py::test_under_a_float32_weight_a_value_is_rounded_once",),
    ),
    Mutation(
        name="hybrid_new_weights_keep_the_old_norms",
        fault="What is derived from the weights stays that of the first version.",
        path="src/tracefp4/models/qwen3_5_moe_weights.py",
        old="                torch.add(self[name].to(derived.dtype), 1.0, out=derived)\n",
        new="                derived.add_(1.0)\n",
        tests=(
            "tests/models/test_qwen3_5_native.py::"
            "test_new_weights_reach_what_is_derived_from_them_in_the_same_places",
        ),
    ),
)
