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
        path=_OP + "reference.py",
        old="    last = lengths[:, None] + ",
        new="    last = torch.full_like(lengths, num_tokens)[:, None] + ",
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
        name="delta_kernel_forgets_the_youngest_input",
        fault="The convolution state moves on without the token of this step.",
        path=_OP + "prepare.cu",
        old="            if (t) conv[(t - 1) * width + at] = x;\n",
        new="            if (t && t < TAPS - 1) conv[(t - 1) * width + at] = x;\n",
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
)
