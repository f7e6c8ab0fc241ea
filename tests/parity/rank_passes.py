"""What each of two ranks does in the tests of `test_distributed`; every function takes its rank and returns evidence.

The models, samples and records are made from the same seeds everywhere, so a test makes the unsharded pass of one
process from the same functions and compares.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from tests.parity.chains import make_chain, shifted
from tests.qat.expert_modules import Experts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.guidance import ReplayBatch, Site
from tracefp4.guidance.session import replay
from tracefp4.qat import attention, emulation, experts
from tracefp4.qat.context_parallel import context_parallel, split_sequence
from tracefp4.qat.expert_parallel import expert_layers, shard_experts, whole_weights
from tracefp4.rl.optimizer import MasterWeightAdamW

ALL_SITES = tuple(Site(kind, layer) for kind in ("x", "w2", "k", "v") for layer in (0, 1))


def setting(**changes):
    """A chain, four samples of different lengths, and decisions of other positions: following them matters."""
    chain = make_chain(**changes)
    engine = chain.engine
    made = type(chain)(chain.model, chain.plan, chain.arithmetic)
    made.engine = lambda: engine(records=ALL_SITES)
    samples = made.rollouts(num_prompts=4, max_tokens=7)
    return chain, samples, [shifted(sample.record).recode("mantissa") for sample in samples]


@contextmanager
def watched():
    """Keep what every site and router decided inside: values by site, expert ids by layer."""
    seen = {}
    originals = experts.round_site, emulation.route_site

    def round_site(x, *, site, **options):
        rounded = originals[0](x, site=site, **options)
        seen[str(site)] = rounded.values.detach().clone()
        return rounded

    def route_site(layer, logits, **options):
        seen[f"router {layer}"] = originals[1](layer, logits, **options)
        return seen[f"router {layer}"]

    experts.round_site = attention.round_site = round_site
    emulation.route_site = route_site
    try:
        yield seen
    finally:
        experts.round_site = attention.round_site = originals[0]
        emulation.route_site = originals[1]


def guided_pass(chain, batch, records, *, denominator, positions=None, take=lambda x: x):
    """Forward and backward under replay: logits, decisions, counts; gradients are left on the model."""
    replayed = ReplayBatch(positions=take(batch.positions), records=records)
    with replay(replayed), watched() as seen:
        logits = chain.model(
            input_ids=take(batch.input_ids),
            attention_mask=take(batch.attention_mask),
            position_ids=take(batch.model_positions()),
            use_cache=False,
        ).logits
        loss = logits[take(batch.attention_mask)].square().sum() / denominator
        loss.backward()
    return {
        "logits": logits.detach(),
        "seen": seen,
        "loss": loss.detach(),
        "counts": replayed.counters.total(),
    }


def gradients(model):
    """Whole gradients by name, summed over nothing: FSDP and expert shards have done that."""
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in model.named_parameters()
    }


def num_tokens(samples):
    return sum(sample.num_tokens for sample in samples)


def half(items, rank):
    return items[2 * rank : 2 * rank + 2]


def wrap(model, mesh, *, sums=True, **options):
    """FSDP over layers and model; gradients are summed over the ranks, or averaged as FSDP does by itself."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model.modules():
        if sums and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def train(chain, batch, records, *, denominator, steps=2):
    """Guided steps of the optimizer: what every pass saw, the gradients, the norm and the weights after."""
    optimizer = MasterWeightAdamW(chain.model, lr=0.01)
    found = []
    for _ in range(steps):
        passed = guided_pass(chain, batch, records, denominator=denominator)
        passed["gradients"] = gradients(chain.model)
        passed["norm"] = optimizer.step(grad_clip=1.0).norm
        found.append(passed)
    return {"steps": found, "weights": whole_weights(chain.model), "quantized": quantizations(chain.model)}


def quantizations(model):
    return [layer.mlp.experts.tracefp4.num_quantizations for layer in model.model.layers]


def fsdp(rank):
    chain, samples, records = setting()
    wrap(chain.model, init_device_mesh("cpu", (2,)))
    batch = chain.batch(half(samples, rank))
    return train(chain, batch, half(records, rank), denominator=num_tokens(samples))


def fsdp_other_dimensions(rank):
    # Mutation target: K of w2 is 48, a shard of it 24: a block and a half.
    chain, samples, records = setting(moe_intermediate_size=48)
    wrap(
        chain.model,
        init_device_mesh("cpu", (2,)),
        shard_placement_fn=lambda p: Shard(2) if p.dim() == 3 else Shard(0),
    )
    shapes = {
        name: tuple(p.to_local().shape) for name, p in chain.model.named_parameters() if "experts" in name
    }
    batch = chain.batch(half(samples, rank))
    return {
        **guided_pass(chain, batch, half(records, rank), denominator=num_tokens(samples)),
        "shapes": shapes,
    }


def fsdp_checkpointing(rank):
    chain, samples, records = setting()
    wrap(chain.model, init_device_mesh("cpu", (2,)))
    chain.model.train()
    chain.model.gradient_checkpointing_enable({"use_reentrant": False})
    for _, state in expert_layers(chain.model):
        state.keeps_copies = False
    batch = chain.batch(half(samples, rank))
    found = guided_pass(chain, batch, half(records, rank), denominator=num_tokens(samples))
    return {
        **found,
        "gradients": gradients(chain.model),
        "copies": sum(len(state._copies) for _, state in expert_layers(chain.model)),
        "quantized": quantizations(chain.model),
    }


@torch.no_grad()
def fsdp_stale_copies(rank):
    """After every change of the sharded weights: the copies that the forward used, and the whole weights."""
    chain, samples, _ = setting()
    wrap(chain.model, init_device_mesh("cpu", (2,)))
    batch = chain.batch(samples[:1])
    found = []
    for change in range(4):
        weights = {n: p for n, p in chain.model.named_parameters() if "experts" in n}
        for n, parameter in enumerate(weights.values()):
            if (n + change) % 2:  # some are left alone: their copies may serve again
                local = parameter.to_local()
                (local if change % 2 else local.data).mul_(-1.5)
        chain.logits(batch)
        held = [state._copies for _, state in expert_layers(chain.model)]
        copies = [layer[name] for layer in held for name in ("gate_up_proj", "down_proj")]
        found.append(
            {
                "whole": [p.full_tensor().clone() for p in weights.values()],
                "copies": [copy.values.clone() for copy in copies],
                "versions": [copy.version for copy in copies],
                "quantized": quantizations(chain.model),
            }
        )
    return found


def refusals(rank):
    """Messages of what cannot be right."""
    found = {}

    def refuse(name, function):
        try:
            function()
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    mesh = init_device_mesh("cpu", (2,))
    chain = make_chain()
    layer = chain.model.model.layers[0].mlp.experts
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.float64)
    x = torch.randn(3, 64, dtype=torch.float64)
    wrap(chain.model, mesh)
    refuse("sharded weight", lambda: layer(x, ids, weights))
    refuse("experts under fsdp", lambda: shard_experts(chain.model, mesh, tokens="same"))
    chain = make_chain()
    layer = chain.model.model.layers[0].mlp.experts
    refuse("tokens", lambda: shard_experts(chain.model, mesh, tokens="some"))
    layer.gate_up_proj = torch.nn.Parameter(layer.gate_up_proj[:4].detach())
    refuse("some experts", lambda: layer(x, ids, weights))
    return found


def experts_same_tokens(rank):
    """Experts over both ranks, everything else under FSDP, the whole batch on each rank."""
    chain, samples, records = setting()
    mesh = init_device_mesh("cpu", (2,))
    held = shard_experts(chain.model, mesh, tokens="same")
    shapes = {tuple(p.to_local().shape) for p in held}
    wrap(chain.model, mesh, sums=False, ignored_params=set(held))
    trained = train(chain, chain.batch(samples), records, denominator=num_tokens(samples))
    return {**trained, "held": shapes}


def experts_own_tokens(rank):
    """Experts over both ranks, everything else under FSDP, each rank with its own half of the batch."""
    chain, samples, records = setting()
    mesh = init_device_mesh("cpu", (2,))
    held = shard_experts(chain.model, mesh, tokens="own")
    wrap(chain.model, mesh, ignored_params=set(held))
    batch = chain.batch(half(samples, rank))
    return train(chain, batch, half(records, rank), denominator=num_tokens(samples))


def expert_module(tokens, ids, rank, *, arithmetic=EMULATED, dtype=torch.float32, backward="dequantized"):
    """One experts module over both ranks, by itself: output, decisions and gradients."""
    module = Experts(num_experts=4, dtype=dtype, arithmetic=arithmetic, backward=backward, ste="clip")
    x = torch.randn(ids.shape[0], 32).to(dtype)
    weights = torch.rand(ids.shape).to(dtype)
    incoming = torch.randn(ids.shape[0], 32).to(dtype)
    mine = slice(None)
    if tokens is not None:
        shard_experts(module, init_device_mesh("cpu", (2,)), tokens=tokens)
        if tokens == "own":
            mine = slice(0, 3) if rank == 0 else slice(3, None)
    x, weights = (t[mine].clone().requires_grad_() for t in (x, weights))
    with watched() as seen:
        y = module(x, ids[mine], weights)
    y.backward(incoming[mine])
    return {
        "y": y.detach(),
        "seen": seen,
        "x": x.grad,
        "weights": weights.grad,
        "gradients": gradients(module),
    }


DST_5_IDS = torch.tensor([[1, 0], [0, 2], [1, 2]])
LAYOUTS_OF_IDS = {
    "dst-5": torch.cat([DST_5_IDS, DST_5_IDS.flip(0)]),
    "one rank's experts": torch.tensor([[0, 1]] * 5),  # the other rank computes nothing
    "one expert": torch.tensor([[3], [3], [3], [3]]),
    "uneven": torch.tensor([[2, 3], [3, 0], [3, 2], [3, 1]]),  # 3 tokens here, 1 there
}
KINDS_OF_NUMBERS = {
    "float32": {"dtype": torch.float32, "arithmetic": EMULATED},
    "float64": {"dtype": torch.float64, "arithmetic": CONTROL},
    "high precision": {"dtype": torch.float32, "arithmetic": EMULATED, "backward": "high_precision"},
}


def expert_modules(rank):
    found = {}
    for tokens in ("same", "own"):
        for name, ids in LAYOUTS_OF_IDS.items():
            for kind, options in KINDS_OF_NUMBERS.items():
                torch.manual_seed(1)
                found[tokens, name, kind] = expert_module(tokens, ids, rank, **options)
    return found


def padded_batch(chain, samples):
    """Both kinds of padding, and columns that divide by four."""
    batch = chain.batch(samples, side="left", left_extra=2)
    extra = -batch.positions.shape[1] % 4
    return batch if not extra else chain.batch(samples, side="left", left_extra=2 + extra)


@contextmanager
def gathered():
    """Keep dtype and number of elements of everything that is gathered inside."""
    found, original = [], dist.all_gather

    def all_gather(parts, mine, **options):
        found.append((mine.dtype, mine.numel()))
        return original(parts, mine, **options)

    dist.all_gather = all_gather
    try:
        yield found
    finally:
        dist.all_gather = original


def context(rank):
    found = {}
    for layout in ("contiguous", "zigzag"):
        chain, samples, records = setting()
        batch = padded_batch(chain, samples)
        shard = split_sequence(batch.positions, layout=layout)
        with context_parallel(chain.model, shard), gathered() as exchanged:
            passed = guided_pass(chain, batch, records, denominator=num_tokens(samples), take=shard.take)
        for parameter in chain.model.parameters():
            dist.all_reduce(parameter.grad)
        found[layout] = {
            **passed,
            "columns": shard.columns,
            "exchanged": exchanged,
            "gathered": shard.gather(passed["logits"]),
            "gradients": gradients(chain.model),
        }
    return found
