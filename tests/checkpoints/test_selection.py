"""What becomes FP4: exact names by default, under patterns, and what no pattern can select."""

import pytest
from tests.checkpoints.tiny_families import FAMILIES, save_tiny

from tracefp4.checkpoints import Checkpoint, inventory, select
from tracefp4.errors import ConfigError


@pytest.fixture
def stock_of(tmp_path):
    """Inventory of a tiny model."""

    def make(family="qwen3_moe", **options):
        save_tiny(family, tmp_path / "m", **options)
        with Checkpoint(tmp_path / "m") as checkpoint:
            return inventory(checkpoint)

    return make


def _modules(chosen):
    return [linear.module for linear in chosen.linears]


def _experts(layer):
    leaves = ("gate_proj", "up_proj", "down_proj")
    return {f"model.layers.{layer}.mlp.experts.{e}.{leaf}" for e in range(4) for leaf in leaves}


@pytest.mark.parametrize("family", FAMILIES)
def test_routed_experts_are_the_default(family, stock_of):
    stock = stock_of(family)
    chosen = select(stock)
    assert _modules(chosen) == [linear.module for linear in stock.linears if linear.kind == "expert"]
    assert chosen.notes == ()
    assert sorted(len(found.members) for found in chosen.groups) == sorted(
        [1, 2] * (len(chosen.linears) // 3)
    )


def test_patterns_are_whole_names(stock_of):
    stock = stock_of()
    assert set(_modules(select(stock, exclude=["model.layers.0.*"]))) == _experts(1)
    chosen = select(stock, include=["model.layers.1.mlp.experts.*", "*.1.self_attn.[qkv]_proj"])
    attention = {f"model.layers.1.self_attn.{name}_proj" for name in "qkv"}
    assert set(_modules(chosen)) == _experts(1) | attention
    # a part of a name is no match
    with pytest.raises(ConfigError, match=r"'experts' matches no module.*whole module names"):
        select(stock, exclude=["experts"])


def test_a_pattern_that_matches_nothing_names_the_nearest(stock_of):
    with pytest.raises(ConfigError, match=r"Near: .*model\.layers\.1\.self_attn\.q_proj"):
        select(stock_of(), include=["model.layers.1.self_atn.q_proj"])


def test_exclude_wins(stock_of):
    chosen = select(stock_of(), include=["*.experts.*"], exclude=["*.layers.1.*"])
    assert set(_modules(chosen)) == _experts(0)


def test_everything_leaves_what_is_never_fp4(stock_of):
    chosen = select(stock_of("qwen2_moe"), include=["*"])
    kinds = {linear.kind for linear in chosen.linears}
    assert kinds == {"expert", "shared_expert", "attention"}
    assert "5 routers and embeddings stay" in chosen.notes[0]
    assert "lm_head stays in high precision: only its exact name" in chosen.notes[1]


def test_the_head_is_taken_by_its_name(stock_of):
    assert _modules(select(stock_of(), include=["lm_head"])) == ["lm_head"]


@pytest.mark.parametrize(
    "pattern, reason",
    [
        ("model.layers.0.mlp.gate", "router: a flipped expert"),
        ("*.mlp.gate", "router: a flipped expert"),
        ("model.embed_tokens", "embedding: it is looked up"),
        ("*norm*", "norm: it is a vector"),
    ],
)
def test_routers_embeddings_and_norms_are_refused(pattern, reason, stock_of):
    with pytest.raises(ConfigError, match=reason):
        select(stock_of(), include=[pattern])


def test_a_vector_is_refused(stock_of):
    with pytest.raises(ConfigError, match=r"sinks|holds no matrix|matches no module"):
        select(stock_of("gpt_oss"), include=["*.sinks"])


def test_exp_4_a_tied_head_is_skipped_with_a_note(stock_of):
    stock = stock_of(tie_word_embeddings=True)
    chosen = select(stock, include=["*"])
    assert "lm_head stays in high precision: it is tied to the embedding." in chosen.notes
    assert "model.embed_tokens.weight" not in {linear.stored for linear in chosen.linears}
    with pytest.raises(ConfigError, match=r"Nothing is left.*lm_head stays in high precision: it is tied"):
        select(stock, include=["lm_head"])


@pytest.mark.parametrize(
    "exclude",
    [
        "model.layers.0.mlp.experts.2.up_proj",
        "model.layers.0.mlp.experts.2.*",
        "model.layers.0.mlp.experts.*.down_proj",
    ],
    ids=["up", "one_expert", "all_down"],
)
def test_experts_of_a_layer_go_together(exclude, stock_of):
    with pytest.raises(ConfigError, match=r"engines run these 12 modules as one"):
        select(stock_of(), exclude=[exclude])


def test_fused_attention_goes_together(stock_of):
    with pytest.raises(ConfigError, match=r"q_proj would become FP4 and .*k_proj not.* 3 modules as one"):
        select(stock_of(), include=["*.q_proj"])


def test_nothing_left_is_an_error(stock_of):
    with pytest.raises(ConfigError, match="Nothing is left to quantize"):
        select(stock_of(), exclude=["*"])
