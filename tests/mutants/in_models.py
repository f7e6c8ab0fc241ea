"""Faults in the engine's pass by whole ops: what it hands on, what it records, where its weights lie."""

from tests.mutants.mutation import Mutation

_PASS = "src/tracefp4/models/native_pass.py"
_TAPS = "src/tracefp4/models/taps.py"
_WEIGHTS = "src/tracefp4/models/qwen3_moe_weights.py"
_TESTS = "tests/models/test_native_pass.py::"
_FOLLOWS = _TESTS + "test_the_definition_that_follows_the_record_of_a_pass_computes_its_logits"
_BYTES = "tests/models/test_native_weights.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="native_stream_without_the_addition",
        fault="The residual stream stays what it was before attention or experts were added.",
        path=_PASS,
        old="        return found.values, found.residual\n",
        new="        return found.values, stream\n",
        tests=(_FOLLOWS,),
    ),
    Mutation(
        name="native_values_recorded_as_keys",
        fault="The record of K holds the bytes of V.",
        path=_PASS,
        old='taps.keep(Site("k", index), found[0])',
        new='taps.keep(Site("k", index), found[1])',
        tests=(_FOLLOWS, _TESTS + "test_records_are_the_bytes_of_the_pages"),
    ),
    Mutation(
        name="native_keys_and_values_exchanged",
        fault="The fused projection is cut in another order than its rows have.",
        path=_PASS,
        old="q, k, v = qkv.view(len(n), -1, sizes.head_dim).split(heads, dim=1)",
        new="q, v, k = qkv.view(len(n), -1, sizes.head_dim).split(heads, dim=1)",
        tests=(_TESTS + "test_equals_the_definition_where_no_activation_is_rounded",),
    ),
    Mutation(
        name="bf16_experts_left_in_the_order_of_experts",
        fault="Rows come back from a product sorted by expert.",
        path="src/tracefp4/models/bf16_experts.py",
        old="grouped_matmul(rows, experts.gate_up, sizes).index_select(0, inverse)",
        new="grouped_matmul(rows, experts.gate_up, sizes)",
        tests=(_TESTS + "test_equals_the_definition_where_no_activation_is_rounded",),
    ),
    Mutation(
        name="taps_stacked_in_another_order",
        fault="Layers are stacked in the order in which sites were named.",
        path=_TAPS,
        old="dict.fromkeys(sorted(sites))",
        new="dict.fromkeys(sites)",
        tests=(_TESTS + "test_stacked_bytes_are_what_a_session_is_told",),
    ),
    Mutation(
        name="taps_static_exponents_of_the_first_layers",
        fault="Static exponents are those of layers 0, 1, ... and not of the recorded ones.",
        path=_TAPS,
        old="exponent_of(kind) or 0 for layer in found)",
        new="exponent_of(kind) or 0 for layer in range(len(found)))",
        tests=(_TESTS + "test_stacked_bytes_are_what_a_session_is_told",),
    ),
    Mutation(
        name="fragments_keep_the_codes_of_the_old_version",
        fault="Bytes of a checkpoint bring their scales and not their codes.",
        path=_WEIGHTS,
        old="            fragments.words.copy_(moved.words)\n",
        new="",
        tests=(_BYTES + "test_bytes_of_a_checkpoint_are_moved_and_never_quantized_again",),
    ),
    Mutation(
        name="places_of_a_padded_segment_ignored",
        fault="Rows of a padded segment are taken from its first cells.",
        path="src/tracefp4/models/batch.py",
        old="flat.index_select(0, self.places)",
        new="flat[: self.end - self.begin]",
        tests=(_TESTS + "test_rows_of_a_padded_segment_find_their_places",),
    ),
    Mutation(
        name="olmoe_keys_are_not_clipped",
        fault="Only queries and values are clipped.",
        path="src/tracefp4/models/qwen3_moe.py",
        old="q, k, v = (x.clamp_(-limit, limit) for x in (q, k, v))",
        new="q, v = (x.clamp_(-limit, limit) for x in (q, v))",
        tests=("tests/models/test_olmoe.py::test_equals_transformers_when_nothing_is_rounded",),
    ),
)
