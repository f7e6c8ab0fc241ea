"""Cases of a decode step beside the experts: attention over cache pages, appending to them, and drawing tokens.

Attention and append compete with bf16 caches: torch's attention over whole sequences, and our own kernels over bf16
pages. Pages lie in random order. Drawing competes with a product whose logits go to memory in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracefp4.bench.kernel_jobs import Bench, Case, Job, KernelSizes, contender, same_bytes
from tracefp4.bench.replay import Call
from tracefp4.bench.row import Check
from tracefp4.bench.traffic import BF16, NVFP4, append, decode_attention, head
from tracefp4.formats import NVFP4_KV
from tracefp4.formats.fragments import MAGNITUDE_BITS, FragmentPages, Kind
from tracefp4.ops.backend import Backend
from tracefp4.ops.kv_append import kv_append, kv_quantize_append
from tracefp4.ops.kv_attention import kv_attention
from tracefp4.ops.kv_attention.device import ROUNDED, Where, error_of
from tracefp4.ops.pages import LayerPages
from tracefp4.ops.sample import Draws, Sampled, draw, sample
from tracefp4.ops.sample.noise import uniform
from tracefp4.ops.sample.reference import logits_reference
from tracefp4.patching.shapes import ModelShape

LOGPROB, PROBABILITY = 2.0**-5, 2.0**-7
"""Largest errors of a log-probability and of a cumulative probability: logits are bf16 numbers up to about 5, so a
product whose sums run in another order moves some of them by 2^-6."""
CHECKED_ROWS = 16
_EXPONENT = -1
_LEAST_SCALE, _MOST_SCALE = 32, 57
"""E4M3 bytes of random pages: scales 2^-3 to 1."""
_QUERY_SCALE = 4.0
"""Scores then have a deviation of about 3, and a few keys most of the weight; under weights that are nearly equal every
result is about zero, and a wrong one could not be told from a right one."""


def step_cases(sizes: KernelSizes) -> Iterator[Case]:
    """Return all cases of this module."""
    for model, num_seqs, context in sizes.attention:
        name = f"kernels.attention.{model}.{num_seqs}x{context_name(context)}"
        yield Case(id=name, op="kv_attention", build=_attention(model, num_seqs, context))
    for model in sizes.models:
        yield Case(id=f"kernels.append.{model}", op="kv_append", build=_append(model))
    yield Case(id=f"kernels.sample.{sizes.sample_model}.{sizes.batch}", op="sample", build=_sample)


def context_name(context: int) -> str:
    """Return a context as ids have it, e.g. `32k`."""
    return f"{context >> 10}k" if context % 1024 == 0 else str(context)


def _attention(model: str, num_seqs: int, context: int) -> Callable[[Bench], Job]:
    def build(bench: Bench) -> Job:
        return _attention_job(bench, bench.sizes.models[model], num_seqs, context)

    return build


def _attention_job(bench: Bench, shape: ModelShape, num_seqs: int, context: int) -> Job:
    tokens = num_seqs * context
    traffic, in_bf16 = (
        decode_attention(shape, num_tokens=tokens, value_bytes=size) for size in (NVFP4, BF16)
    )
    bench.made.clear()
    generator = bench.generator(0)
    num_frames = tokens // bench.sizes.page_size
    order = torch.randperm(num_frames, generator=generator, device=bench.device)
    where = Where(
        page_table=order.view(num_seqs, -1),
        positions=torch.full((num_seqs, 1), context - 1, device=bench.device),
    )
    size = (shape.kv_heads, num_frames, bench.sizes.page_size)
    sets = [draw_pages(bench, size, shape.head_dim, seed) for seed in range(bench.sets(traffic.bytes))]
    query_size = (num_seqs, 1, shape.q_heads, shape.head_dim)
    queries = torch.randn(query_size, generator=generator, device=bench.device, dtype=torch.bfloat16)
    queries.mul_(_QUERY_SCALE)
    plain = [
        torch.randn((*size, shape.head_dim), generator=generator, device=bench.device, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    # the same numbers as whole sequences: which token they belong to does not matter for time
    whole = [t.view(num_seqs, shape.kv_heads, context, shape.head_dim) for t in plain]
    bf16_pages = LayerPages(keys=plain[0], values=plain[1])

    def ours(pages: LayerPages) -> Tensor:
        return kv_attention(queries, pages, **where, rounds_probabilities=True, backend=bench.backend)

    def torch_attention() -> Tensor:
        return scaled_dot_product_attention(queries.transpose(1, 2), whole[0], whole[1], enable_gqa=True)

    return Job(
        ours=contender([lambda p=p: ours(p) for p in sets], traffic),  # type: ignore[misc]
        theirs={
            "torch SDPA in bf16": contender([torch_attention], in_bf16),
            "ours over bf16 pages": contender([lambda: ours(bf16_pages)], in_bf16),
        },
        traffic=traffic,
        check=lambda outputs: check_attention(outputs[0], queries, sets[0], where),
        facts={"sequences": num_seqs, "context": context},
    )


def draw_pages(bench: Bench, size: tuple[int, int, int], head_dim: int, seed: int) -> LayerPages:
    """Return pages full of random codes and scales, in fragment order."""
    generator = bench.generator(seed)

    def drawn(kind: Kind) -> FragmentPages:
        def numbers(low: int, high: int, width: int) -> Tensor:
            return torch.randint(
                low, high, (*size, width), generator=generator, device=bench.device, dtype=torch.uint8
            )

        return FragmentPages(
            packed=numbers(0, 256, head_dim // 2),
            block_scales=numbers(_LEAST_SCALE, _MOST_SCALE, head_dim // 16),
            outer=torch.tensor(_EXPONENT, dtype=torch.int8, device="cpu"),
            scheme=NVFP4_KV,
            kind=kind,
        )

    return LayerPages(keys=drawn("k"), values=drawn("v"))


def check_attention(got: Tensor, queries: Tensor, pages: LayerPages, where: Where) -> Check:
    """Compare the first sequence with float64 attention over the dequantized pages."""
    values = pages.values
    assert isinstance(values, FragmentPages)
    magnitudes = LayerPages(keys=pages.keys, values=replace(values, packed=values.packed & MAGNITUDE_BITS))
    first = Where(page_table=where["page_table"][:1], positions=where["positions"][:1])
    error = error_of(got[:1], queries[:1], (pages, magnitudes), first)
    return Check(error=error, allowed=ROUNDED, text="of the weighted magnitudes of V, from float64")


def _append(model: str) -> Callable[[Bench], Job]:
    def build(bench: Bench) -> Job:
        return _append_job(bench, bench.sizes.models[model])

    return build


def _append_job(bench: Bench, shape: ModelShape) -> Job:
    """One new token of every sequence; the sets of operands together fill all pages."""
    batch = bench.sizes.batch
    traffic, in_bf16 = (append(shape, num_tokens=batch, value_bytes=size) for size in (NVFP4, BF16))
    num_sets = bench.sets(traffic.bytes)
    bench.made.clear()
    num_frames = -(-num_sets * batch // bench.sizes.page_size)
    size = (shape.kv_heads, num_frames, bench.sizes.page_size)
    here, there = (draw_pages(bench, size, shape.head_dim, seed=0) for _ in range(2))
    generator = bench.generator(0)
    slots = torch.randperm(num_frames * bench.sizes.page_size, generator=generator, device=bench.device)
    plain = [
        torch.empty((*size, shape.head_dim), dtype=torch.bfloat16, device=bench.device) for _ in range(2)
    ]
    rows = torch.randn(
        (num_sets, 2, batch, shape.kv_heads, shape.head_dim),
        generator=generator,
        device=bench.device,
        dtype=torch.bfloat16,
    )

    def quantized(index: int, to: LayerPages, backend: Backend) -> list[Tensor]:
        at = slots[index * batch : (index + 1) * batch]
        found = kv_quantize_append(to, *rows[index], slots=at, backend=backend)
        return [part for t in found for part in (t.packed, t.block_scales)]

    def in_plain_pages(index: int) -> None:
        at = slots[index * batch : (index + 1) * batch]
        for to, new in zip(plain, rows[index], strict=True):
            kv_append(to, new, slots=at, backend=bench.backend)

    def check(outputs: list[list[Tensor]]) -> Check:
        wanted = [quantized(index, there, Backend.REFERENCE) for index in range(num_sets)]
        pairs = [
            (a, b)
            for got, found in zip(outputs, wanted, strict=True)
            for a, b in zip(got, found, strict=True)
        ]
        for a, b in ((here.keys, there.keys), (here.values, there.values)):
            assert isinstance(a, FragmentPages) and isinstance(b, FragmentPages)
            pairs += [(a.packed, b.packed), (a.block_scales, b.block_scales)]
        return same_bytes(*pairs)

    return Job(
        ours=contender([lambda i=i: quantized(i, here, bench.backend) for i in range(num_sets)], traffic),  # type: ignore[misc]
        theirs={"bf16 append": contender([lambda i=i: in_plain_pages(i) for i in range(num_sets)], in_bf16)},  # type: ignore[misc]
        traffic=traffic,
        check=check,
        facts={"tokens": batch},
    )


def _sample(bench: Bench) -> Job:
    """One token of every sequence, at temperature 1 and without cuts, from the head of a model."""
    shape, batch = bench.sizes.models[bench.sizes.sample_model], bench.sizes.batch
    traffic = head(shape, num_rows=batch)
    bench.made.clear()
    generator = bench.generator(0)
    hidden, matrix = (
        torch.randn(rows, shape.hidden, generator=generator, device=bench.device, dtype=torch.bfloat16)
        for rows in (batch, shape.vocab)
    )
    matrix.mul_(shape.hidden**-0.5)
    ones = torch.ones(batch, dtype=torch.float64, device=bench.device)
    index = torch.arange(batch, device=bench.device)
    draws = Draws(keys=index * 7919, positions=index, temperature=ones, top_k=index * 0, top_p=ones)

    def ours() -> Sampled:
        return sample(hidden, matrix, draws, backend=bench.backend)

    def by_torch() -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax((hidden @ matrix.T).float(), dim=-1)
        noise = torch.empty_like(logprobs).exponential_().log()
        tokens = (logprobs - noise).argmax(-1, keepdim=True)
        return tokens, logprobs.gather(1, tokens)

    calls: list[Call] = [ours]
    return Job(
        ours=contender(calls, traffic),
        theirs={
            "matmul and draw": contender([by_torch], traffic),
            "matmul and draw, compiled": contender([torch.compile(by_torch, dynamic=False)], traffic),
        },
        traffic=traffic,
        check=lambda outputs: check_draws(outputs[0], (hidden, matrix), draws),
        facts={"rows": batch, "vocabulary": shape.vocab},
    )


def check_draws(got: Sampled, operands: tuple[Tensor, Tensor], draws: Draws) -> Check:
    """Compare the first rows with the reference: the log-probability of each token, and that u points at it.

    Args:
        got: What was drawn.
        operands: Hidden states and head.
        draws: Parameters, without cuts and at temperature 1.
    """
    first = slice(CHECKED_ROWS)
    tokens = got.tokens[first]
    is_token = bool(((tokens >= 0) & (tokens < operands[1].shape[0])).all())
    if not is_token:
        return Check(error=torch.inf, allowed=1.0, text="tolerances: tokens outside the vocabulary")
    logits = logits_reference(operands[0][first], operands[1])
    columns = {
        name: getattr(draws, name)[first] for name in ("keys", "positions", "temperature", "top_k", "top_p")
    }
    scored = draw(logits, Draws(**columns, forced=tokens))
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    after = cumulative.gather(1, tokens[:, None])[:, 0]
    u = uniform(columns["keys"], columns["positions"])
    outside = torch.maximum(u - after, after - scored.logprobs.exp() - u).clamp(min=0)
    parts: list[Any] = [(got.logprobs[first] - scored.logprobs).abs() / LOGPROB, outside / PROBABILITY]
    return Check(
        error=float(torch.stack(parts).max()), allowed=1.0, text="tolerances: log-probabilities, draws"
    )
