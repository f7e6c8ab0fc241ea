"""What engines fuse shares one outer scale: by known names, and with a warning where names are unknown."""

import warnings

import pytest
from tests.checkpoints.tiny_families import save_tiny

from tracefp4.checkpoints import Checkpoint, Cut, Linear, group, inventory


def _linears(*names, num_in=8, widths=None):
    return [
        Linear(
            module=name, stored=f"{name}.weight", cut=Cut(), kind="attention", layer=0, expert=None, role="",
            shape=(4, (widths or {}).get(name, num_in)),
        )
        for name in names
    ]  # fmt: skip


def _grouped(linears):
    return [[member.module.rpartition(".")[2] for member in found.members] for found in group(linears)]


@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v")], ids=["proj", "to"]
)
def test_shr_3_self_attention_shares_one_scale_under_both_names(names):
    linears = _linears(*(f"layers.0.attn.{name}" for name in reversed(names)), "layers.0.attn.to_out")
    assert _grouped(linears) == [list(names), ["to_out"]]
    amax = dict(zip(names, (3.0, 6.0, 2.0), strict=True))
    shared = max(amax[member.module.rpartition(".")[2]] for member in group(linears)[0].members)
    assert shared == 6.0


def test_shr_3_an_alias_of_k_is_in_the_group_of_k():
    q, k, v = _linears("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")
    alias = Linear(**{name: getattr(v, name) for name in Linear.__slots__} | {"stored": k.stored})
    (found,) = group([q, k, alias])
    assert found.members == (q, k, alias)


@pytest.mark.parametrize(
    "parent", ["decoder.0.cross_attn", "decoder.0.encoder_attn", "blocks.0.attn2", "blocks.0.crossattention"]
)
def test_shr_3_cross_attention_keeps_q_alone(parent):
    names = ("to_q", "to_k", "to_v") if "blocks" in parent else ("q_proj", "k_proj", "v_proj")
    assert _grouped(_linears(*(f"{parent}.{name}" for name in names))) == [[names[0]], list(names[1:])]


def test_shr_3_cross_attention_shows_in_its_widths():
    names = ("b.0.attn.q_proj", "b.0.attn.k_proj", "b.0.attn.v_proj")
    linears = _linears(*names, widths={names[0]: 16})
    assert _grouped(linears) == [["q_proj"], ["k_proj", "v_proj"]]


def test_shr_3_unknown_attention_is_listed_in_a_warning():
    linears = _linears("h.0.attention.query", "h.0.attention.key", "h.0.attention.value", "h.0.mlp.fc")
    with pytest.warns(UserWarning, match=r"h\.0\.attention \(key, query, value\)") as caught:
        assert _grouped(linears) == [["query"], ["key"], ["value"], ["fc"]]
    assert len(caught) == 1


FAMILY_GROUPS = {
    "qwen3_moe": {("q_proj", "k_proj", "v_proj"): 2, ("gate_proj", "up_proj"): 8},
    "mixtral": {("q_proj", "k_proj", "v_proj"): 2, ("w1", "w3"): 8},
    "gpt_oss": {("q_proj", "k_proj", "v_proj"): 2, ("gate_proj", "up_proj"): 8},
    # dense layer 0, and in layer 1 four experts and the shared one
    "deepseek_v3": {("q_a_proj", "kv_a_proj_with_mqa"): 2, ("gate_proj", "up_proj"): 6},
    "qwen3_5_moe_text": {
        ("q_proj", "k_proj", "v_proj"): 1, ("in_proj_qkv", "in_proj_z"): 1, ("in_proj_b", "in_proj_a"): 1,
        ("gate_proj", "up_proj"): 10,
    },
    "qwen3_next": {("q_proj", "k_proj", "v_proj"): 1, ("gate_proj", "up_proj"): 10},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILY_GROUPS)
def test_groups_of_real_families_are_known(family, tmp_path):
    save_tiny(family, tmp_path)
    with Checkpoint(tmp_path) as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("error")
        linears = inventory(checkpoint).linears
        groups = group(linears)
    assert sorted(member.module for found in groups for member in found.members) == sorted(
        linear.module for linear in linears
    )
    counts: dict[tuple[str, ...], int] = {}
    for found in groups:
        leaves = tuple(member.module.rpartition(".")[2] for member in found.members)
        parents = {member.module.rpartition(".")[0] for member in found.members}
        assert len(parents) == 1
        if len(leaves) > 1:
            counts[leaves] = counts.get(leaves, 0) + 1
    assert counts == FAMILY_GROUPS[family]
