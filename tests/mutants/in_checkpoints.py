"""Faults in what checkpoints store: who shares a scale, how fused experts lie, what stays in high precision."""

from tests.mutants.mutation import Mutation

_ROOM = "src/tracefp4/checkpoints/"
_TESTS = "tests/checkpoints/"

SHARING = (
    Mutation(
        name="gate_and_up_do_not_share_a_scale",
        fault="w1 and w3 (gate and up), which engines run as one matrix, get two outer scales.",
        path=_ROOM + "grouping.py",
        old='("gate_proj", "up_proj"), ("w1", "w3"), ',
        new="",
        tests=(_TESTS + "test_selection.py::test_routed_experts_are_the_default",),
    ),
    Mutation(
        name="v_does_not_share_with_q_and_k",
        fault="Only q and k of self-attention share their outer scale.",
        path=_ROOM + "grouping.py",
        old='("q_proj", "k_proj", "v_proj")',
        new='("q_proj", "k_proj")',
        tests=(_TESTS + "test_grouping.py::test_shr_3_self_attention_shares_one_scale_under_both_names",),
    ),
    Mutation(
        name="cross_attention_shares_with_q",
        fault="q of cross-attention, which reads another input, shares the scale of k and v.",
        path=_ROOM + "grouping.py",
        old="return _CROSS.search(parent) is not None or len(",
        new="return len(",
        tests=(_TESTS + "test_grouping.py::test_shr_3_cross_attention_keeps_q_alone",),
    ),
    Mutation(
        name="part_of_a_fused_matrix_selected",
        fault="Some experts of a layer become FP4 and others not, although engines run them as one.",
        path=_ROOM + "selection.py",
        old="    _check_whole(stock, chosen)\n",
        new="",
        tests=(_TESTS + "test_selection.py::test_experts_of_a_layer_go_together",),
    ),
)

LAYOUT = (
    Mutation(
        name="up_before_gate",
        fault="The halves of interleaved gate and up are exchanged.",
        path=_ROOM + "linears.py",
        old='enumerate(("gate", "up"))',
        new='enumerate(("up", "gate"))',
        tests=(
            _TESTS + "test_linears.py::test_lay_5_interleaved_and_concatenated_files_give_the_same_halves",
        ),
    ),
    Mutation(
        name="interleaved_read_as_halves",
        fault="gpt-oss's alternating columns are cut in the middle.",
        path=_ROOM + "linears.py",
        old="Cut(0, True, first, None, 2)",
        new="Cut(0, True, first * (num_out // 2), None if first else num_out // 2, 1)",
        tests=(
            _TESTS + "test_linears.py::test_lay_5_interleaved_and_concatenated_files_give_the_same_halves",
        ),
    ),
    Mutation(
        name="fused_experts_not_transposed",
        fault="[in, out] is read as [out, in], which a square matrix does not show.",
        path=_ROOM + "linears.py",
        old="turned = stored.t() if self.is_transposed and stored.ndim == 2 else stored",
        new="turned = stored.t() if self.is_transposed and stored.shape[0] != stored.shape[-1] else stored",
        tests=(
            _TESTS + "test_linears.py::test_a_square_fused_tensor_is_read_by_the_family_not_by_its_shape",
        ),
    ),
    Mutation(
        name="lost_expert_accepted",
        fault="An expert that is missing in the files is not exported, silently.",
        path=_ROOM + "linears.py",
        old="    _check_experts(checkpoint, linears)\n",
        new="",
        tests=(_TESTS + "test_linears.py::test_a_lost_expert_is_refused",),
    ),
)

PRECISION = (
    Mutation(
        name="router_quantized",
        fault="The exclusion list lacks the router.",
        path=_ROOM + "selection.py",
        old='    "router": "a flipped expert costs more than any rounding",\n',
        new="",
        tests=(_TESTS + "test_selection.py::test_everything_leaves_what_is_never_fp4",),
    ),
    Mutation(
        name="embedding_quantized",
        fault="The exclusion list lacks the embedding.",
        path=_ROOM + "selection.py",
        old='    "embedding": "it is looked up, not multiplied",\n',
        new="",
        tests=(_TESTS + "test_selection.py::test_everything_leaves_what_is_never_fp4",),
    ),
    Mutation(
        name="tied_head_quantized",
        fault="A head that is the embedding becomes FP4, and the embedding with it.",
        path=_ROOM + "selection.py",
        old="if stock.ties_embeddings or pattern != name:",
        new="if pattern != name:",
        tests=(_TESTS + "test_selection.py::test_exp_4_a_tied_head_is_skipped_with_a_note",),
    ),
    Mutation(
        name="head_quantized_by_a_glob",
        fault="Any pattern that matches the head takes it.",
        path=_ROOM + "selection.py",
        old="if stock.ties_embeddings or pattern != name:",
        new="if stock.ties_embeddings:",
        tests=(_TESTS + "test_selection.py::test_everything_leaves_what_is_never_fp4",),
    ),
    Mutation(
        name="shared_expert_gate_is_no_router",
        fault="The gate of the shared expert is taken for a linear like others.",
        path=_ROOM + "names.py",
        old='if leaf in ("gate", "router", "shared_expert_gate"):',
        new='if leaf in ("gate", "router"):',
        tests=(_TESTS + "test_names.py::test_every_stored_tensor_has_its_kind",),
    ),
    Mutation(
        name="draft_layer_taken_for_a_decoder_layer",
        fault="The first layer behind the decoder is exported as one of it.",
        path=_ROOM + "names.py",
        old="layer >= num_layers",
        new="layer > num_layers",
        tests=(_TESTS + "test_names.py::test_names_of_releases",),
    ),
)

FILES = (
    Mutation(
        name="rows_of_another_expert",
        fault="A row is read from the start of its tensor.",
        path=_ROOM + "container.py",
        old="self._begins[name] + start * row_bytes)\n\n    def close(self)",
        new="self._begins[name])\n\n    def close(self)",
        tests=(_TESTS + "test_container.py::test_rows_are_the_rows_of_the_whole",),
    ),
    Mutation(
        name="gap_between_tensors_accepted",
        fault="Bytes that no entry describes pass for a whole file.",
        path=_ROOM + "header.py",
        old="if start != position:",
        new="if start < position:",
        tests=(_TESTS + "test_header.py::test_damage_is_refused",),
    ),
)

OUTER = (
    Mutation(
        name="modelopt_stores_a_divisor",
        fault="weight_scale_2 and input_scale hold 1 / g.",
        path=_ROOM + "layouts/modelopt.py",
        old='kind = "multiplier"',
        new='kind = "divisor"',
        tests=(
            _TESTS + "test_layouts.py::test_static_input_scales_are_the_calibrated_powers_in_both_directions",
        ),
    ),
    Mutation(
        name="compressed_tensors_stores_a_multiplier",
        fault="weight_global_scale and input_global_scale hold g.",
        path=_ROOM + "layouts/compressed_tensors.py",
        old='kind = "divisor"',
        new='kind = "multiplier"',
        tests=(
            _TESTS + "test_layouts.py::test_static_input_scales_are_the_calibrated_powers_in_both_directions",
        ),
    ),
    Mutation(
        name="divisor_converted_without_turning_over",
        fault="A divisor's exponent becomes a multiplier's with its sign unchanged.",
        path=_ROOM + "outer_scales.py",
        old='exponent = -exponent if kind == "divisor" else exponent',
        new="exponent = +exponent",
        tests=(_TESTS + "test_outer_scales.py::test_every_exponent_has_its_power_and_comes_back",),
    ),
    Mutation(
        name="outer_scale_rounded_to_a_power",
        fault="A scale that is no power of two is converted as if it were one.",
        path=_ROOM + "outer_scales.py",
        old="if not bool(are_powers_of_two(outer).all()):",
        new="if not bool((outer > 0).all()):",
        tests=(_TESTS + "test_outer_scales.py::test_what_is_no_power_is_refused",),
    ),
    Mutation(
        name="fused_experts_stacked_in_halves",
        fault="gpt-oss's gate rows are written before its up rows instead of alternating.",
        path=_ROOM + "layouts/fused.py",
        old="return torch.stack(tuple(parts), dim=1).flatten(0, 1) if len(parts) > 1 else parts[0]",
        new="return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]",
        tests=(_TESTS + "test_layouts.py::test_transformers_unpacks_gpt_oss_to_the_same_values",),
    ),
    Mutation(
        name="modelopt_exclusions_incomplete",
        fault="hf_quant_config.json does not name what stays in high precision.",
        path=_ROOM + "layouts/modelopt.py",
        old='"exclude_modules": list(kept),',
        new='"exclude_modules": list(kept)[1:],',
        tests=(_TESTS + "test_layouts.py::test_exp_1_excluded_are_exactly_the_matrices_that_are_not_packed",),
    ),
    Mutation(
        name="compressed_tensors_exclusions_incomplete",
        fault="config.json does not name what stays in high precision.",
        path=_ROOM + "layouts/compressed_tensors.py",
        old='"ignore": list(kept),',
        new='"ignore": list(kept)[1:],',
        tests=(_TESTS + "test_layouts.py::test_exp_1_excluded_are_exactly_the_matrices_that_are_not_packed",),
    ),
)

MUTATIONS = (*SHARING, *LAYOUT, *PRECISION, *FILES, *OUTER)
