"""Every gate, in one table: which figure of which suite must be how large before it may be claimed.

A gate without a stored result is shown as such; it does not hold. Rows are measured by the suites of
`tracefp4 bench` that their ids begin with; suite `engine` does not call transformers yet. In ids, 8k = 8,192 tokens of
context; `fp32_state`, `bf16_state`: what the recurrent layers of Qwen3.5 keep; `memory60`: .6 of the card.
"""

from collections.abc import Iterator

from tracefp4.bench.engine_points import LEAST_PEER_SHARE
from tracefp4.bench.gates import Bound, Gate, at_least, at_most
from tracefp4.bench.guidance_rows import AIM_BYTES, AMBITION_BYTES
from tracefp4.bench.results import GUIDANCE_ROW
from tracefp4.bench.row import BenchRow
from tracefp4.patching.rules import PlanRules

H200 = "H200"
DEFAULT_CODEC = PlanRules().guidance
"""What recipes record and follow when they name no codec."""
SUITES = ("cpu", "guidance", "kernels", "trainer", "engine")
MODELS = ("qwen3-30b-a3b", "qwen3.5-35b-a3b")


def _cpu() -> Iterator[Gate]:
    quantize, dequantize = "cpu.quantize.NVFP4_ROW_POW2", "cpu.dequantize.NVFP4_ROW_POW2"
    for row in (f"{quantize}.float32", "cpu.quantize.NVFP4_TENSOR_POW2.float32", f"{quantize}.bfloat16"):
        yield _cpu_gate(row, "quantize and pack over torchao", 20.0, 2000.0)
    for end in ("float32", "bfloat16", "float32.into_a_buffer"):
        yield _cpu_gate(f"{dequantize}.{end}", "dequantize over torchao", 30.0, 4000.0)
    yield _cpu_gate(f"{quantize}.float32.eager.torchao", "quantize in plain torch over torchao", 3.0, 120.0)
    yield _cpu_gate(
        f"{dequantize}.float32.eager.torchao", "dequantize in plain torch over torchao", 3.0, None
    )
    for peer in ("compressed_tensors", "plain_torch"):
        yield Gate(row=f"cpu.pack.{peer}", text="pack codes", gate=None, aim=_rate(3000.0))


def _cpu_gate(row: str, text: str, ratio: float, aim: float | None) -> Gate:
    return Gate(row=row, text=text, gate=at_least(ratio, "ratio"), aim=None if aim is None else _rate(aim))


def _rate(number: float) -> Bound:
    return at_least(number, unit="Melem/s")


def _guidance() -> Iterator[Gate]:
    yield Gate(
        row=GUIDANCE_ROW,
        text="activation bytes per token of Qwen3.5-35B-A3B, trainer no further off than BF16",
        gate=at_most(AIM_BYTES, unit="bytes"),
        aim=at_most(AMBITION_BYTES, unit="bytes"),
    )


def _h200(row: str, text: str, gate: Bound, aim: Bound | None = None) -> Gate:
    return Gate(row=row, text=text, gate=gate, aim=aim, hardware=H200)


def _elementwise() -> Iterator[Gate]:
    for scheme in ("NVFP4_KV", "NVFP4_ROW_POW2"):
        row = f"kernels.quantize.{scheme}"
        yield _h200(
            row, "quantize and pack, of copy bandwidth", at_least(0.80, "share"), at_least(0.92, "share")
        )
    yield _h200(
        "kernels.quantize.small",
        "quantize at decode size, over a bf16 copy",
        at_most(1.3, "cost"),
        at_most(1.1, "cost"),
    )
    yield _h200(
        f"kernels.recorded.{DEFAULT_CODEC}",
        "quantize with a record, over none",
        at_most(1.06, "cost"),
        at_most(1.03, "cost"),
    )
    for rule in ("full", "mantissa", DEFAULT_CODEC):
        row = f"kernels.guided.{rule}"
        yield _h200(
            row, "guided rounding, of copy bandwidth", at_least(0.80, "share"), at_least(0.93, "share")
        )
        yield _h200(row, "guided rounding over torch.compile", at_least(1.5, "ratio"), at_least(2.0, "ratio"))
    yield _h200(
        "kernels.guided.backward", "guided forward and backward, over two copies", at_most(1.25, "cost"),
        at_most(1.08, "cost"),
    )  # fmt: skip


def _experts() -> Iterator[Gate]:
    few = {1: (1.2, None), 8: (1.2, 2.0)}
    decode = {16: (3.0, 3.7), 32: (3.0, 3.7), 64: (3.0, 3.7), 256: (2.5, 3.0)}
    many = dict.fromkeys((4096, 16384, 65536), (0.92, 0.98))
    for model in MODELS:
        for tokens, (gate, aim) in (few | decode | many).items():
            yield _h200(
                f"kernels.experts.{model}.{tokens}.uniform", "whole expert layer over the best bf16 layer",
                at_least(gate, "ratio"), None if aim is None else at_least(aim, "ratio"),
            )  # fmt: skip


def _cache() -> Iterator[Gate]:
    for case in ("qwen3.5-35b-a3b.16x32k", "qwen3.5-35b-a3b.8x128k", "qwen3-30b-a3b.32x32k"):
        yield _h200(
            f"kernels.attention.{case}",
            "FP4 KV decode over the best bf16",
            at_least(2.3, "ratio"),
            at_least(3.1, "ratio"),
        )
    yield _h200(
        "kernels.attention.qwen3.5-35b-a3b.1x128k", "one long sequence, a layer", at_most(60, unit="us"),
        at_most(35, unit="us"),
    )  # fmt: skip
    for model in MODELS:
        yield _h200(
            f"kernels.append.{model}", "quantizing KV append beyond the bf16 append", at_most(2.0, "excess", "us"),
            at_most(0.5, "excess", "us"),
        )  # fmt: skip


def _rest_of_a_step() -> Iterator[Gate]:
    for end, kept in (("", "bf16"), (".fp32_state", "float32")):
        yield _h200(
            f"kernels.delta_net.qwen3.5-35b-a3b.256{end}", f"gated delta net decode, {kept} state, of copy bandwidth",
            at_least(0.75, "share"), at_least(0.88, "share"),
        )  # fmt: skip
    yield _h200(
        "kernels.sample.qwen3.5-35b-a3b.256",
        "lm_head and sampling",
        at_most(400, unit="us"),
        at_most(290, unit="us"),
    )
    yield _h200(
        "kernels.refit.qwen3-30b-a3b",
        "new weights of all experts",
        at_most(150, unit="ms"),
        at_most(45, unit="ms"),
    )


def _trainer() -> Iterator[Gate]:
    yield _h200(
        "trainer.qwen3-30b-a3b.4_layers.32k", "guided training step, 8K micro-batches, beyond BF16",
        at_most(4.0, unit="%"), at_most(1.5, unit="%"),
    )  # fmt: skip


def _qwen3_engine() -> Iterator[Gate]:
    for context, rate, aim, ratio in (("8k", 9000, 11000, 4.4), ("32k", 2300, None, 4.1)):
        row = f"engine.qwen3-30b-a3b.{context}"
        aimed = None if aim is None else at_least(aim, unit="tokens/s")
        yield _h200(row, "decode at the largest batch", at_least(rate, unit="tokens/s"), aimed)
        yield _h200(row, "decode over our own BF16 mode", at_least(ratio, "ratio"))
    for context, together, steady in (("8k", (4.6, 5.5), (3.8, 4.5)), ("32k", (4.4, 5.3), (3.9, 4.6))):
        for accounting, (least, further) in (("together", together), ("steady", steady)):
            yield _h200(
                f"engine.qwen3-30b-a3b.{context}.{accounting}",
                "decode over our own BF16 mode",
                at_least(least, "ratio"),
                at_least(further, "ratio"),
            )
    yield _h200(
        "engine.qwen3-30b-a3b.8k.bf16",
        "our BF16 mode, of its byte floor",
        at_least(LEAST_PEER_SHARE, "share"),
        at_least(0.75, "share"),
    )
    yield _h200(
        "engine.qwen3-30b-a3b.8k.batch64", "decode over BF16", at_least(2.3, "ratio"), at_least(2.9, "ratio")
    )
    yield _h200(
        "engine.qwen3-30b-a3b.8k.batch8", "decode over BF16", at_least(1.6, "ratio"), at_least(2.2, "ratio")
    )
    yield _h200(
        "engine.qwen3-30b-a3b.8k.transformers", "decode over transformers in BF16, batch 64", at_least(5, "ratio"),
        at_least(15, "ratio"),
    )  # fmt: skip
    yield _h200(
        "engine.qwen3-30b-a3b.1k.batch1",
        "one sequence, a token",
        at_most(3.0, unit="ms"),
        at_most(1.6, unit="ms"),
    )


def _hybrid_engine() -> Iterator[Gate]:
    model = "engine.qwen3.5-35b-a3b"
    for context, with_fp32, with_bf16 in (("8k", 2.1, 2.5), ("32k", 3.3, 3.7), ("128k", 3.4, 3.6)):
        for state, ratio in (("fp32_state", with_fp32), ("bf16_state", with_bf16)):
            row = f"{model}.{context}.{state}"
            yield _h200(row, "decode at the largest batch over our own BF16 mode", at_least(ratio, "ratio"))
    for row, text, gate, aim in (
        ("128k.bf16_state.memory60", "the same with 0.6 of the card", 4.2, 5.0),
        ("32k.batch64.fp32_state", "decode over BF16", 2.0, 2.4),
        ("8k.batch8.fp32_state", "decode over BF16", 1.6, 2.2),
        ("1k.bf16_state", "decode over BF16, up to 1,024 sequences", 1.25, 1.4),
    ):
        yield _h200(f"{model}.{row}", text, at_least(gate, "ratio"), at_least(aim, "ratio"))
    yield _h200(
        f"{model}.1k.batch1.fp32_state",
        "one sequence, a token",
        at_most(3.0, unit="ms"),
        at_most(1.6, unit="ms"),
    )


def _overheads() -> Iterator[Gate]:
    yield _h200(
        "engine.qwen3-30b-a3b.8k.recording",
        "recording, of a decode step",
        at_most(2.0, unit="%"),
        at_most(0.5, unit="%"),
    )
    yield _h200(
        "engine.qwen3-30b-a3b.8k.outside_forward",
        "decode steps outside the forward pass",
        at_most(3.0, unit="%"),
        at_most(0.5, unit="%"),
    )
    yield _h200(
        "engine.qwen3-30b-a3b.8k.dequantizing_passes",
        "passes that only dequantize",
        at_most(0, unit="launches"),
    )


GATES: tuple[Gate, ...] = (
    *_cpu(),
    *_guidance(),
    *_elementwise(),
    *_experts(),
    *_cache(),
    *_rest_of_a_step(),
    *_trainer(),
    *_qwen3_engine(),
    *_hybrid_engine(),
    *_overheads(),
)
"""All of them, in the order in which they are shown."""


def gates_of(row: BenchRow) -> list[Gate]:
    """Return the gates that judge a row on its hardware."""
    return [gate for gate in GATES if gate.row == row.id and gate.hardware in row.machine.hardware]


def is_missed(row: BenchRow) -> bool:
    """Return whether a row misses one of its gates, or its result is wrong."""
    is_wrong = row.check is not None and not row.check.holds
    return is_wrong or any(gate.met(row) == "no" for gate in gates_of(row))
