"""A checkpoint is opened as a whole: what is missing, double or contradicting is found before anything is read."""

import json

import pytest
import torch
from safetensors.torch import save_file, save_model
from tests.checkpoints.tiny_families import save_tiny

from tracefp4.checkpoints import Checkpoint
from tracefp4.errors import ConfigError, FormatError

A, B = {"a": torch.arange(6.0).reshape(3, 2)}, {"b": torch.ones(4, dtype=torch.bfloat16)}


def _write(path, *, index=None, config=None, **shards):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config if config is not None else {"model_type": "x"}))
    for name, tensors in shards.items():
        save_file(tensors, path / f"{name}.safetensors", metadata={"format": "pt"})
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _sharded(path, weight_map=None, **shards):
    weight_map = weight_map or {"a": "s1.safetensors", "b": "s2.safetensors"}
    return _write(path, index={"metadata": {}, "weight_map": weight_map}, **(shards or {"s1": A, "s2": B}))


def test_one_file(tmp_path):
    with Checkpoint(_write(tmp_path / "m", model=A | B)) as checkpoint:
        assert {name: spec.shape for name, spec in checkpoint.specs.items()} == {"a": (3, 2), "b": (4,)}
        assert checkpoint.shard_of == dict.fromkeys(("a", "b"), "model.safetensors")
        assert checkpoint.total_bytes == 24 + 8
        assert torch.equal(checkpoint.read("a"), A["a"])
        assert torch.equal(checkpoint.read_rows("a", 1, 3), A["a"][1:3])
        assert checkpoint.config == {"model_type": "x"}
        with pytest.raises(FormatError, match="no tensor 'c'"):
            checkpoint.read("c")


def test_shards(tmp_path):
    with Checkpoint(_sharded(tmp_path / "m")) as checkpoint:
        assert checkpoint.shard_of == {"a": "s1.safetensors", "b": "s2.safetensors"}
        assert torch.equal(checkpoint.read("b"), B["b"])


def test_what_transformers_saves_in_shards_opens(tmp_path):
    model = save_tiny("qwen3_moe", tmp_path / "m")
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    (tmp_path / "m" / "model.safetensors").unlink(missing_ok=True)
    with Checkpoint(tmp_path / "m") as checkpoint:
        assert len(set(checkpoint.shard_of.values())) > 2
        assert checkpoint.total_bytes == sum(2 * p.numel() for p in model.parameters())


def _without(path, name):
    (path / name).unlink()
    return path


REFUSED = {
    "no_directory": (lambda p: p / "absent", ConfigError, "not a directory"),
    "no_config": (lambda p: _without(_write(p, model=A), "config.json"), ConfigError, "no config.json"),
    "no_weights": (lambda p: _write(p), ConfigError, "no weights at all"),
    "missing_shard": (lambda p: _without(_sharded(p), "s2.safetensors"), ConfigError, "lacks the shard s2"),
    "index_names_more": (
        lambda p: _sharded(p, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"}),
        ConfigError, "lists c in s2.safetensors, which lacks it",
    ),
    "index_names_another_shard": (
        lambda p: _sharded(p, {"a": "s1.safetensors", "b": "s1.safetensors"}, s1=A, s2=B), ConfigError, "lists b in s1",
    ),
    "shard_holds_more": (
        lambda p: _sharded(p, s1=A, s2=B | {"c": torch.ones(1)}), ConfigError, "does not list c of s2",
    ),
    "tensor_twice": (lambda p: _sharded(p, s1=A, s2=A | B), ConfigError, "a is stored twice, in s1"),
    "two_sources": (lambda p: _sharded(p, model=A, s1=A, s2=B), ConfigError, "holds both"),
    "config_not_json": (
        lambda p: [_write(p, model=A), (p / "config.json").write_text("{"), p][-1], FormatError, "is not JSON",
    ),
    "config_a_list": (lambda p: _write(p, config=[1], model=A), FormatError, "a JSON list"),
    "index_empty": (lambda p: _write(p, index={}, s1=A), FormatError, "no usable weight_map"),
    "index_leaves_directory": (lambda p: _sharded(p, {"a": "../s1.safetensors"}), FormatError, "../s1"),
    "index_no_names": (lambda p: _sharded(p, {"a": 1}), FormatError, "weight_map; got 1"),
    "truncated_shard": (
        lambda p: [_sharded(p), (p / "s2.safetensors").write_bytes((p / "s2.safetensors").read_bytes()[:-1]), p][-1],
        FormatError, "s2.safetensors is not a whole safetensors file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    make, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        Checkpoint(make(tmp_path / "m"))


def test_pickled_weights_are_never_loaded(tmp_path):
    path = _write(tmp_path / "m")
    torch.save(A, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*Convert it"):
        Checkpoint(path)


@pytest.mark.parametrize(
    "config, has_head, tied",
    [
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"text_config": {"tie_word_embeddings": True}}, True, True),
        ({}, True, False),
        ({}, False, True),
    ],
    ids=["said", "denied", "nested", "unsaid_with_head", "unsaid_without_head"],
)
def test_tied_embeddings_are_known(config, has_head, tied, tmp_path):
    tensors = {"lm_head.weight": torch.ones(2, 2)} if has_head else A
    with Checkpoint(_write(tmp_path / "m", config=config, model=tensors)) as checkpoint:
        assert checkpoint.ties_embeddings is tied


def test_names_that_share_bytes_are_known(tmp_path):
    module = torch.nn.ModuleDict({"k_proj": torch.nn.Linear(4, 2, bias=False)})
    module["v_proj"] = module["k_proj"]
    _write(tmp_path / "m")
    save_model(module, str(tmp_path / "m" / "model.safetensors"))
    with Checkpoint(tmp_path / "m") as checkpoint:
        assert checkpoint.aliases == {"v_proj.weight": "k_proj.weight"}


def test_extra_files_are_those_of_the_model(tmp_path):
    path = _write(tmp_path / "m", model=A)
    kept = [
        "LICENSE", "additional_chat_templates/tool.jinja", "chat_template.jinja", "generation_config.json",
        "merges.txt", "modeling_x.py", "preprocessor_config.json", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    left = [
        "README.md", "hf_quant_config.json", "optimizer.safetensors", "state.json", "rng.json", "pending.bin",
        "original/tokenizer.model", ".git/LICENSE",
    ]  # fmt: skip
    for name in kept + left:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("x")
    with Checkpoint(path) as checkpoint:
        assert list(checkpoint.extra_files) == kept
