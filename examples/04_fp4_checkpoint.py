"""Write an FP4 checkpoint, read it back, change its layout and return: the same bytes, and the same log-probs.

Pass a checkpoint directory of the Qwen3-MoE family, or nothing for a tiny random model.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tracefp4 import LocalEngine, PlanRules, SamplingParams, plan
from tracefp4.checkpoints import Output, Settings, change_layout, load_fp4, quantize_checkpoint
from tracefp4.formats import EMULATED, NVFP4_TENSOR_POW2
from tracefp4.rl.checkpoint import save_model
from tracefp4.rl.policy import load_policy
from tracefp4.rl.tiny import TinyShape, build_model, build_tokenizer

QUESTION = "What is 12 + 30 - 7?"
WEIGHT_ONLY = PlanRules(guidance="none", weight=NVFP4_TENSOR_POW2.name, activation="none", kv="none")


def main(directory: Path) -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else directory / "source"
    if not source.exists():
        tokenizer = build_tokenizer([QUESTION])
        save_model(build_model(TinyShape(), tokenizer=tokenizer), tokenizer, source)

    # Tensor by tensor into the layout of compressed-tensors; gate and up of an expert share one scale.
    packed = directory / "packed"
    summary = quantize_checkpoint(source, Output(path=packed), Settings(scheme=NVFP4_TENSOR_POW2))
    errors = sorted(error.relative_error for error in summary.errors.values())
    before, after = summary.num_bytes
    print(f"{len(errors)} matrices in FP4, relative error {errors[0]:.3f} to {errors[-1]:.3f}")
    print(f"{before / 1e6:.1f} MB became {after / 1e6:.1f} MB")

    # The engine runs the bytes as they are; nothing is quantized again.
    policy, stored = load_policy(str(source)), load_fp4(packed)
    prompt = policy.tokenizer(QUESTION)["input_ids"]
    layers = plan(policy.model, WEIGHT_ONLY).layers
    answers = []
    for state in (policy.model.state_dict(), stored.state):
        engine = LocalEngine(
            policy.model.config,
            state,
            precision=layers,
            arithmetic=EMULATED,
            plan_digest="example",
            num_pages=64,
            max_batch=4,
            max_tokens_per_step=64,
        )
        (completions,) = engine.generate([prompt], SamplingParams(max_tokens=16, n=1, seed=0))
        answers.append(completions[0])
    same = answers[0].token_ids == answers[1].token_ids and answers[0].logprobs == answers[1].logprobs
    print(f"weights quantized by the engine and bytes read from disk: log-probs equal bit for bit: {same}")

    # Another layout holds the same codes and scales, so the way back gives the same file.
    other = change_layout(packed, Output(path=directory / "modelopt"), "modelopt")
    again = change_layout(other, Output(path=directory / "again"), "compressed-tensors")
    name = "model.safetensors"
    same = (packed / name).read_bytes() == (again / name).read_bytes()
    print(f"compressed-tensors to ModelOpt and back: file equal byte for byte: {same}")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        main(Path(temporary))
