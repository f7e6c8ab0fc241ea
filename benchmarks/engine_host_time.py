"""Host time of a decode step: scheduling, inputs, bookkeeping and accepted tokens, with a model that takes no time.

    python benchmarks/engine_host_time.py --sequences 64 256 512

Prints, for every number of running sequences, the median and the largest CPU time in milliseconds of a step, and of the
gap in it: from the tokens of one pass to the start of the next, when a device has nothing to do. First with the next
pass started after everything is booked, then ahead of it. Pages are 16 positions, so every step gives new pages to a
sixteenth of the sequences. Nothing is recorded, and the passes stand in for captured ones: their tokens are there at
once. Collections of Python's garbage are part of the time; how many were full is printed.
"""

import argparse
import gc
import time
from types import SimpleNamespace

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.formats.arithmetic import EMULATED
from tracefp4.formats.precision import BF16_LAYER
from tracefp4.ops.sample import Sampled
from tracefp4.rollout import LocalEngine, SamplingParams

PROMPT = 480
STEPS = 60


class Canned:
    """Captured passes that draw token 3."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        """Milliseconds of CPU time from tokens to the next pass."""
        self._ended = 0.0

    def run(self, count: int) -> tuple[Sampled, None]:
        """Draw for every row."""
        self.gaps.append(1e3 * (time.thread_time() - self._ended))
        return Sampled(torch.full((count,), 3), torch.zeros(count, dtype=torch.float64)), None

    def wait(self) -> None:
        """Return at once."""
        self._ended = time.thread_time()


def new_engine(num_sequences: int) -> LocalEngine:
    """Return an engine with so many sequences past their prompts."""
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, tie_word_embeddings=False,
    )  # fmt: skip
    engine = LocalEngine(
        config,
        Qwen3MoeForCausalLM(config).state_dict(),
        precision=(BF16_LAYER,),
        arithmetic=EMULATED,
        plan_digest="",
        num_pages=num_sequences * (PROMPT // 16 + 8),
        max_batch=num_sequences,
        max_tokens_per_step=max(8192, num_sequences),
        max_length=1024,
        records=False,
    )
    engine._runner._graphs = Canned()
    engine._runner._forward = lambda batch: (torch.zeros(len(batch.logit_rows), 40), None)
    for index in range(num_sequences):
        engine.submit([1] * (PROMPT + index % 16), SamplingParams(max_tokens=100), prompt_index=index)
    return engine


def measured(num_sequences: int, *, is_ahead: bool) -> SimpleNamespace:
    """Return steps and gaps, sorted, in milliseconds of CPU time."""
    engine, times = new_engine(num_sequences), []
    if not is_ahead:
        engine._scheduler.place = lambda: False
    while len(engine._scheduler.rows) < num_sequences:
        engine.step()
    engine.step()
    engine._runner._graphs.gaps.clear()
    num_full = gc.get_stats()[2]["collections"]
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - began))
    num_full = gc.get_stats()[2]["collections"] - num_full
    return SimpleNamespace(steps=sorted(times), gaps=sorted(engine._runner._graphs.gaps), num_full=num_full)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 512])
    torch.set_num_threads(1)
    for count in parser.parse_args().sequences:
        for is_ahead in (False, True):
            found = measured(count, is_ahead=is_ahead)
            parts = [
                f"{name} {times[len(times) // 2]:.2f} ms, at most {times[-1]:.2f}"
                for name, times in (("step", found.steps), ("gap", found.gaps))
            ]
            order = "ahead" if is_ahead else "after"
            print(f"{count:5} sequences, {order}: {'; '.join(parts)}; {found.num_full} full collections")


if __name__ == "__main__":
    main()
