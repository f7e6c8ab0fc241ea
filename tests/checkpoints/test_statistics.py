"""The statistics file: it comes back as it was written, and the wrong one is refused.

Mutations that must die: experts with few tokens trusted, channels of down averaged over experts
(`_experts_with_few_tokens`), gate and down exchanged (same), digests that ignore the tensors (`_digest`).
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.assertions import assert_bitwise

from tracefp4.checkpoints import LayerStatistics, Statistics, model_digest, read_statistics
from tracefp4.errors import ConfigError, FormatError

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_experts": 3,
    "dtype": "bfloat16",
}


@pytest.fixture
def statistics():
    def layer():
        return LayerStatistics(
            tokens=torch.tensor([100, 63, 0]),
            x_square=torch.rand(3, 32),
            x_square_all=torch.rand(32),
            w2_square=torch.rand(3, 16),
            amax=torch.tensor([5.25, 3000.0]),
        )

    return Statistics(
        model=model_digest(CONFIG), source="0123456789abcdef", num_tokens=163, layers={0: layer(), 3: layer()}
    )


def test_it_comes_back_as_it_was_written(statistics, tmp_path):
    path = tmp_path / "s.safetensors"
    (tmp_path / ".s.safetensors.tmp").write_bytes(b"left by a run that was killed")
    statistics.write(path)
    statistics.write(path)  # replaces
    found = read_statistics(path)
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]
    assert (found.model, found.source, found.num_tokens, found.min_tokens) == (
        statistics.model, "0123456789abcdef", 163, 64,
    )  # fmt: skip
    assert sorted(found.layers) == [0, 3] and found.digest == statistics.digest
    for i, layer in statistics.layers.items():
        for name in LayerStatistics.__dataclass_fields__:
            assert_bitwise(getattr(found.layers[i], name), getattr(layer, name))


def test_experts_with_few_tokens_are_not_trusted(statistics):
    layer = statistics.layers[3]
    assert statistics.few(3).tolist() == [False, True, True]
    for role in ("gate", "up"):
        assert_bitwise(statistics.importance(3, role, expert=0, width=32), layer.x_square[0])
        assert_bitwise(statistics.importance(3, role, expert=1, width=32), layer.x_square_all)
    assert_bitwise(statistics.importance(3, "down", expert=0, width=16), layer.w2_square[0])
    assert_bitwise(statistics.importance(3, "down", expert=2, width=16), torch.zeros(16))
    trusting = replace(statistics, min_tokens=1)
    assert_bitwise(trusting.importance(3, "down", expert=1, width=16), layer.w2_square[1])


def test_exponents_leave_three_binades(statistics):
    # 5.25 / 2688 = 2^-9.0001: smallest k is -9 (2688 * 2^-9 = 5.25 exactly), + 3; 3000 / 2688 > 1: k = 1, + 3
    assert statistics.exponents() == {0: (-6, 4), 3: (-6, 4)}


def test_the_digest_covers_numbers_and_origin(statistics):
    other = replace(statistics.layers[0], x_square=statistics.layers[0].x_square + 1)
    changed = [
        replace(statistics, layers={**statistics.layers, 0: other}),
        replace(statistics, source="f" * 16),
        replace(statistics, min_tokens=1),
    ]
    assert len({s.digest for s in (statistics, *changed)}) == 4


def test_exp_another_model_is_refused(statistics):
    statistics.check_model({**CONFIG, "dtype": "float32", "transformers_version": "6"})
    statistics.check_model({"text_config": CONFIG})
    with pytest.raises(ConfigError, match="collected on a model of shape"):
        statistics.check_model({**CONFIG, "num_experts": 4})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, "gate", 0, 32), ConfigError, "hold no layer 1"),
        ((0, "gate_up", 0, 32), ConfigError, "got gate_up"),
        ((0, "gate", 3, 32), ConfigError, "of expert 3"),
        ((0, "gate", -1, 32), ConfigError, "of expert -1"),
        ((0, "down", 0, 32), FormatError, "hold 16 channels"),
    ],
)
def test_what_was_not_measured_is_refused(statistics, arguments, error, message):
    layer, role, expert, width = arguments
    with pytest.raises(error, match=message):
        statistics.importance(layer, role, expert=expert, width=width)


def test_other_files_are_refused(statistics, tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        read_statistics(tmp_path / "none.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="without statistics of ours"):
        read_statistics(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"junk")
    with pytest.raises(FormatError):
        read_statistics(tmp_path / "b.safetensors")


@pytest.mark.parametrize("damage", ["negative", "nan", "shape", "dtype", "missing", "version"])
def test_damaged_files_are_refused(statistics, tmp_path, damage):
    path = tmp_path / "s.safetensors"
    statistics.write(path)
    tensors, name = load_file(path), "layers.3.w2_square"
    header = statistics._header()
    changed = {
        "negative": -tensors[name], "nan": tensors[name] * float("nan"), "shape": tensors[name][:2].clone(),
        "dtype": tensors[name].double(),
    }  # fmt: skip
    tensors[name] = changed.get(damage, tensors[name])
    if damage == "missing":
        del tensors[name]
    if damage == "version":
        header = header.replace('"version": 1', '"version": 2')
    save_file(tensors, path, metadata={"tracefp4.statistics": header})
    with pytest.raises(ConfigError if damage == "version" else FormatError):
        read_statistics(path)
