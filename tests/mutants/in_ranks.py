"""Faults of several ranks: stale copies under FSDP, rows and gradients of experts elsewhere, a sequence's columns."""

from tests.mutants.mutation import Mutation

_ROOM = "src/tracefp4/qat/"
_PASSES = "tests/parity/test_distributed.py::"
_SAME = _PASSES + "test_dst_3_dst_5_experts_over_ranks_decide_as_one_process"
_OWN = _PASSES + "test_dst_5_experts_over_ranks_with_their_own_batches_train_as_one_process"
_MODULES = _PASSES + "test_dst_4_dst_5_experts_over_ranks_whatever_they_receive"
_SEQUENCE = _PASSES + "test_pad_5_a_sequence_over_ranks_follows_its_records"

MUTATIONS = (
    Mutation(
        name="moments_stay_behind",
        fault="A resumed optimizer starts its moments again.",
        path="src/tracefp4/rl/optimizer.py",
        old='key: _laid_out(tensors[f"{key}.{name}"], like=master)',
        new="key: torch.zeros_like(master)",
        tests=(_PASSES + "test_ckp_3_a_checkpoint_of_one_process_goes_on_on_two_ranks",),
    ),
    Mutation(
        name="state_of_one_rank",
        fault="A checkpoint of ranks holds the shard of the rank that wrote it.",
        path="src/tracefp4/rl/optimizer.py",
        old="return tensor.full_tensor() if",
        new="return tensor.to_local() if",
        tests=(_PASSES + "test_ckp_3_a_checkpoint_of_two_ranks_goes_on_in_one_process",),
    ),
    Mutation(
        name="gathered_weights_trust_the_version",
        fault="A copy of the FP4 weights is served by version and address, which FSDP leaves as they were.",
        path=_ROOM + "experts.py",
        old="return is_same and (self.fingerprint is None or self.fingerprint == fingerprint(weight))",
        new="return is_same",
        tests=(_PASSES + "test_a_gathered_weight_is_never_served_by_a_stale_copy",),
    ),
    Mutation(
        name="part_of_the_experts_accepted",
        fault="A rank runs on the experts that it happens to hold.",
        path=_ROOM + "experts.py",
        old="(wanted is not None and tuple(weight.shape) != wanted)",
        new="False",
        tests=(_PASSES + "test_parts_of_a_matrix_and_unknown_splits_are_refused",),
    ),
    Mutation(
        name="token_gradient_of_one_rank",
        fault="A token's gradient lacks the parts of experts on other ranks.",
        path=_ROOM + "dispatch.py",
        old="whole = sum_gradients(x, self.group) if per_token else x",
        new="whole = x",
        tests=(_SAME,),
    ),
    Mutation(
        name="results_return_in_the_order_of_experts",
        fault="Rows that came from several ranks are sent back in the order they were multiplied in.",
        path=_ROOM + "dispatch.py",
        old="leaving = rows.index_select(0, self._departure)",
        new="leaving = rows",
        tests=(_OWN,),
    ),
    Mutation(
        name="merged_rows_are_added",
        fault="Rows of other ranks are added as numbers: a negative zero arrives as a positive one, with another code.",
        path=_ROOM + "collectives.py",
        old="dist.all_reduce(merged.view(_WORD[x.itemsize]), group=group)",
        new="dist.all_reduce(merged, group=group)",
        tests=(_MODULES,),
    ),
    Mutation(
        name="key_gradients_of_one_rank",
        fault="The gradient of a key lacks the queries of other ranks.",
        path=_ROOM + "collectives.py",
        old="return arrived.sum(0)",
        new="return arrived[dist.get_rank(group)]",
        tests=(_SEQUENCE,),
    ),
    Mutation(
        name="columns_in_the_order_of_ranks",
        fault="Gathered keys stay in the order of the ranks, which zigzag is not.",
        path=_ROOM + "context_parallel.py",
        old=".index_select(2, self.order.to(x.device))",
        new="",
        tests=(_SEQUENCE,),
    ),
    Mutation(
        name="mask_of_the_first_columns",
        fault="The causal mask takes a slice's queries for the first columns of the row.",
        path=_ROOM + "context_parallel.py",
        old="queries = self.take(keys)",
        new="queries = keys[:, : len(self.columns)]",
        tests=("tests/qat/test_context_parallel.py::test_a_query_sees_its_past_and_no_padding",),
    ),
    Mutation(
        name="zigzag_is_not_mirrored",
        fault="The second half of the columns is dealt in the order of the first.",
        path=_ROOM + "context_parallel.py",
        old="chunks[num_ranks:].flip(0)",
        new="chunks[num_ranks:]",
        tests=("tests/qat/test_context_parallel.py::test_pad_5_eight_tokens_on_two_ranks",),
    ),
    Mutation(
        name="part_takes_its_own_maximum",
        fault="A part of a row or matrix finds its outer scale alone.",
        path=_ROOM + "parts.py",
        old="outer_scale(largest_of_ranks(largest, group).unsqueeze(-1), scheme)",
        new="outer_scale(largest.unsqueeze(-1), scheme)",
        tests=("tests/qat/test_parts.py::test_dst_1_dst_3_parts_have_the_bytes_of_the_whole",),
    ),
    Mutation(
        name="cut_inside_a_block",
        fault="Columns are cut evenly, whatever the block size.",
        path=_ROOM + "parts.py",
        old="sizes = [blocks // num_parts + (part < blocks % num_parts) for part in range(num_parts)]",
        new="sizes = [width / num_parts / block_size for part in range(num_parts)]",
        tests=("tests/qat/test_parts.py::test_dst_1_blocks_are_cut_between",),
    ),
)
