"""What searched block scales do to outputs: nearest, four over six, and searches with and without importances.

Two subjects. Synthetic: a Gaussian matrix whose inputs are correlated and have channels of very different size;
relative error of X W^T on fresh inputs, over seeds. A tiny mixture of experts, warm-started here: the experts' weights
are replaced by their quantized values; relative error of the experts' outputs, and KL to the unquantized model per
token of held-out text. Importances come from other text than the evaluation. `--steps` sets the warm start.
"""

import argparse
import copy
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.checkpoints import Statistics, model_digest
from tracefp4.checkpoints.collector import observe
from tracefp4.formats import NVFP4_TENSOR_POW2, SCHEMES
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.ops.search_scales import search_scales
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.policy import load_policy
from tracefp4.rl.prompts import build_source, encode
from tracefp4.rl.solutions import solve_chain_sum
from tracefp4.rl.warmstart import WarmStart, warm_start

SCHEME = NVFP4_TENSOR_POW2
FOUR_OVER_SIX = SCHEMES["NVFP4_TENSOR_POW2_4OVER6_MSE"]
METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nearest": lambda w, h: dequantize(quantize(w, scheme=SCHEME)),
    "four over six, MSE": lambda w, h: dequantize(quantize(w, scheme=FOUR_OVER_SIX)),
    "search, unweighted": lambda w, h: dequantize(search_scales(w, importance=None, scheme=SCHEME)),
    "search, H-Scale": lambda w, h: dequantize(search_scales(w, importance=h, scheme=SCHEME)),
}
SEEDS = 8
TASK = TaskConfig(
    name="chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, seed=3
)
FIRST_CALIBRATION, FIRST_HELD_OUT = 700_000_000, 800_000_000


def relative(error: Tensor, of: Tensor) -> float:
    """Return the ratio of two Frobenius norms."""
    return float(error.norm() / of.norm())


def synthetic(seed: int) -> dict[str, tuple[float, float]]:
    """Return (error of the weights, error of the outputs) by method."""
    torch.manual_seed(seed)
    rows, width, tokens = 512, 1024, 4096
    w = torch.randn(rows, width) * 0.02
    sizes = torch.exp(torch.randn(width))  # channels differ by a factor of e either way
    mixing = torch.randn(width, 32) * 0.3

    def inputs() -> Tensor:
        return (torch.randn(tokens, width) + torch.randn(tokens, 32) @ mixing.T) * sizes

    h, x = inputs().square().mean(0), inputs()
    found = {}
    for name, method in METHODS.items():
        difference = method(w, h) - w
        found[name] = (relative(difference, w), relative(x @ difference.T, x @ w.T))
    return found


def print_synthetic() -> None:
    """Print the mean over seeds, and the ratio to nearest with its standard error over seeds."""
    runs = [synthetic(seed) for seed in range(SEEDS)]
    print(f"\nsynthetic, {SEEDS} seeds\n{'method':22}{'weights':>10}{'outputs':>10}{'outputs / nearest':>22}")
    for name in METHODS:
        weights, outputs = (torch.tensor([run[name][i] for run in runs]) for i in (0, 1))
        ratio = outputs / torch.tensor([run["nearest"][1] for run in runs])
        error = float(ratio.std() / SEEDS**0.5)
        print(f"{name:22}{weights.mean():10.4f}{outputs.mean():10.4f}{ratio.mean():14.4f} +- {error:.4f}")


def token_rows(tokenizer: Any, first: int, num_items: int) -> list[Tensor]:
    """Return demonstrations of the task as token ids."""
    source = build_source(TASK)
    rows = []
    for i in range(first, first + num_items):
        task = source.item(i)
        answer = tokenizer(solve_chain_sum(task.prompt), add_special_tokens=False)["input_ids"]
        rows.append(torch.tensor([*encode(task, tokenizer=tokenizer), *answer, tokenizer.eos_token_id]))
    return sorted(rows, key=len)


def with_experts(model: Any, statistics: Statistics, method: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return a copy of a model whose routed experts hold quantized values."""
    changed = copy.deepcopy(model)
    for layer, block in enumerate(changed.model.layers):
        experts = block.mlp.experts
        for parameter, role in ((experts.gate_up_proj, "gate"), (experts.down_proj, "down")):
            num, _, width = parameter.shape
            h = [statistics.importance(layer, role, expert=e, width=width) for e in range(num)]
            parameter.data = method(parameter.data, torch.stack(h).unsqueeze(1))
    return changed


def experts_errors(model: Any, changed: Any, rows: list[Tensor]) -> float:
    """Return the mean over layers of the relative error of the experts' outputs on the unquantized model's inputs."""
    squares = torch.zeros(len(model.model.layers), 2)

    def watch(layer: int) -> Callable[..., None]:
        def hook(_: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            other = changed.model.layers[layer].mlp.experts(*arguments)
            squares[layer] += torch.stack([(other - output).square().sum(), output.square().sum()])

        return hook

    handles = [b.mlp.experts.register_forward_hook(watch(i)) for i, b in enumerate(model.model.layers)]
    for row in rows:
        model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return float((squares[:, 0] / squares[:, 1]).sqrt().mean())


def log_probs(model: Any, rows: list[Tensor]) -> list[Tensor]:
    """Return the log-probabilities of all next tokens, [T, V] a row."""
    return [model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1) for row in rows]


@torch.no_grad()
def print_tiny(path: Path) -> None:
    """Print errors of the experts and KL per token, with the standard error of its difference to nearest."""
    policy = load_policy(path)
    model, tokenizer = policy.model, policy.tokenizer
    calibration = token_rows(tokenizer, FIRST_CALIBRATION, 600)
    layers = observe(model, calibration)
    num_tokens = sum(map(len, calibration))
    statistics = Statistics(
        model=model_digest(model.config.to_dict()), source="", num_tokens=num_tokens, layers=layers
    )
    few = sum(int(statistics.few(i).sum()) for i in layers)
    held_out = token_rows(tokenizer, FIRST_HELD_OUT, 150)
    print(
        f"\ntiny mixture of experts, {num_tokens} tokens of calibration, {few} experts under "
        f"{statistics.min_tokens} tokens, {sum(map(len, held_out))} held-out tokens"
    )
    print(f"{'method':22}{'experts':>10}{'KL':>12}{'KL - nearest':>26}{'seconds':>9}")
    exact = log_probs(model, held_out)
    of_nearest = None
    for name, method in METHODS.items():
        started = time.perf_counter()
        changed = with_experts(model, statistics, method)
        seconds = time.perf_counter() - started
        pairs = zip(exact, log_probs(changed, held_out), strict=True)
        kl = torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in pairs])  # per held-out item
        of_nearest = kl if of_nearest is None else of_nearest
        more = kl - of_nearest
        error = float(more.std() / len(more) ** 0.5)
        experts = experts_errors(model, changed, held_out[:30])
        print(f"{name:22}{experts:10.4f}{kl.mean():12.6f}{more.mean():+14.6f} +- {error:.6f}{seconds:9.1f}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, 1 thread, {SCHEME.name}")
    print_synthetic()
    with tempfile.TemporaryDirectory() as folder:
        loss = warm_start(WarmStart(task=TASK, steps=options.steps, seed=options.seed), path=Path(folder))
        print(f"\nwarm start: {options.steps} steps, seed {options.seed}, loss {loss:.3f}")
        print_tiny(Path(folder))


if __name__ == "__main__":
    main()
