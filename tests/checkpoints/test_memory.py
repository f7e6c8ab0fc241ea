"""Memory of a whole quantization is bounded by the largest tensor and does not grow with the model."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tracefp4.checkpoints import TensorSpec
from tracefp4.checkpoints.header import plan_header
from tracefp4.checkpoints.target import plan_shards

# Qwen3-30B-A3B, all but the number of layers.
HIDDEN, INNER, EXPERTS, VOCABULARY, HEADS, KV_HEADS, HEAD_SIZE = 2048, 768, 128, 151936, 32, 4, 128
NUM_SHARDS = 8
LARGEST = VOCABULARY * HIDDEN * 2
ALLOWED_BYTES = 2 * LARGEST + 2**30
# Names of twice as many tensors, and what an allocator happens to keep.
GROWTH = 1.05
PATTERN_BYTES = 64 << 10
DISK_BYTES = 8 * 10**9
CHILD = """
import resource, sys
from tracefp4.cli.main import run
sys.argv = ["tracefp4", "quantize", *sys.argv[1:], "--json", "--overwrite"]
try:
    run()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def _specs(layers):
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{layer}self_attn.{leaf}_norm.weight": (HEAD_SIZE,) for leaf in "qk"}
        shapes[f"{layer}self_attn.q_proj.weight"] = (HEADS * HEAD_SIZE, HIDDEN)
        shapes |= {f"{layer}self_attn.{leaf}_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN) for leaf in "kv"}
        shapes[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_SIZE)
        shapes[f"{layer}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            expert = f"{layer}mlp.experts.{e}."
            shapes |= {f"{expert}{leaf}_proj.weight": (INNER, HIDDEN) for leaf in ("gate", "up")}
            shapes[f"{expert}down_proj.weight"] = (HIDDEN, INNER)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return [TensorSpec(name, torch.bfloat16, shape) for name, shape in shapes.items()]


def _write(directory, layers):
    """A checkpoint of real shapes: every tensor begins with random values, the rest are holes that read as zeros.

    What lies in a tensor changes no allocation, and holes take no time to write.
    """
    directory.mkdir()
    specs = _specs(layers)
    pattern = (
        torch.randn(PATTERN_BYTES // 2, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    )
    data = memoryview(pattern.view(torch.uint8).numpy())
    limit = int(sum(spec.num_bytes for spec in specs) / NUM_SHARDS * 1.04)
    shards = plan_shards(specs, max_shard_bytes=limit)
    assert len(shards) == NUM_SHARDS
    for shard, held in shards.items():
        header, places, length = plan_header(held, metadata={"format": "pt"})
        with open(directory / shard, "wb") as file:
            file.write(header)
            file.truncate(length)
            for spec in held:
                file.seek(places[spec.name])
                file.write(data[: spec.num_bytes])
    index = {"weight_map": {spec.name: shard for shard, held in shards.items() for spec in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))


def _peak(source, out):
    """Quantize in a process of its own; return its largest resident size in bytes, and what it printed."""
    command = [sys.executable, "-c", CHILD, str(source), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return int(result.stderr.split()[-1]) * 1024, json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_peak_is_bounded_by_the_largest_tensor_and_not_by_the_model(tmp_path):
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip(f"needs {DISK_BYTES} free bytes in {tmp_path}")
    peaks = {}
    try:
        for layers in (4, 8):
            _write(tmp_path / "m", layers)
            peaks[layers], answer = _peak(tmp_path / "m", tmp_path / "q")
            assert len(answer["modules"]) == layers * EXPERTS * 3
            shutil.rmtree(tmp_path / "m")
            shutil.rmtree(tmp_path / "q")
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert peaks[4] <= ALLOWED_BYTES, peaks
    assert peaks[8] <= peaks[4] * GROWTH, peaks
