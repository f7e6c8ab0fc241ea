"""More of what two ranks do: transformers' own plans, maxima over ranks, and the loop of docs/distributed.md."""

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from tests.models.tiny_models import tiny_model
from tests.parity.chains import VOCABULARY, Chain, make_chain
from tests.parity.rank_passes import gradients, guided_pass, half, num_tokens, setting, wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from tracefp4.formats import NVFP4_ROW_POW2, NVFP4_TENSOR_FP32, NVFP4_TENSOR_POW2
from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.formats.calibration import calibrate_exponent
from tracefp4.guidance import Site
from tracefp4.patching import PlanRules, apply
from tracefp4.patching.sharing import share_exponents
from tracefp4.qat.expert_parallel import shard_experts, whole_weights
from tracefp4.qat.parts import block_spans, largest_of_ranks, quantize_part
from tracefp4.rl.checkpoint import TrainState, load_optimizer, load_state, save
from tracefp4.rl.optimizer import MasterWeightAdamW
from tracefp4.rl.planning import remembered_plan

DOCUMENT = Path(__file__).parents[2] / "docs" / "distributed.md"
SPLIT_SCHEMES = (NVFP4_ROW_POW2, NVFP4_TENSOR_POW2, NVFP4_TENSOR_FP32)


def message_of(function):
    """What an error says; fails where there is none."""
    try:
        function()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("accepted")


def sharded_by_transformers(weights, **options):
    """A tiny model under one of transformers' plans, as a load on two ranks leaves it."""
    model = tiny_model(vocab_size=VOCABULARY).double()
    model.load_state_dict(weights)
    mesh = init_device_mesh("cpu", (2,))
    config = DistributedConfig(tp_size=2, tp_plan="auto", **options)
    return Qwen3MoeForCausalLM.maybe_distribute_model(model, config, mesh), mesh


def transformers_plans(rank):
    chain, samples, records = setting()
    weights = chain.model.state_dict()
    found = {}
    model, _ = sharded_by_transformers(weights)
    found["tensor parallel"] = message_of(lambda: apply(model, chain.plan, arithmetic=CONTROL))
    model, mesh = sharded_by_transformers(weights, enable_expert_parallel=True)
    found["other dtype"] = message_of(lambda: apply(model, chain.plan, arithmetic=EMULATED))
    apply(model, chain.plan, arithmetic=CONTROL)
    other = type(chain)(model, chain.plan, chain.arithmetic)
    batch = chain.batch(samples)
    found["too early"] = message_of(lambda: other.logits(batch))
    shard_experts(model, mesh, tokens="same")
    passed = guided_pass(other, batch, records, denominator=num_tokens(samples))
    return {**passed, "refused": found, "gradients": gradients(model)}


def experts_on_a_mesh(rank):
    """Four ranks, a sample each: experts over one dimension of a mesh and under FSDP over the other."""
    chain, samples, records = setting()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    every = init_device_mesh("cpu", (4,))
    shard_experts(chain.model, mesh["experts"], tokens="own")
    for layer in chain.model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["data"])
        fully_shard(layer, mesh=every)
    fully_shard(chain.model, mesh=every)
    for module in chain.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    held = [p for n, p in chain.model.named_parameters() if "experts" in n]
    batch = chain.batch(samples[rank : rank + 1])
    passed = guided_pass(chain, batch, records[rank : rank + 1], denominator=num_tokens(samples))
    return {
        **passed,
        "gradients": gradients(chain.model),
        "held": {tuple(p.to_local().shape) for p in held},
        "mask": batch.attention_mask,
    }


def calibrated(amax_k, amax_v):
    """The tiny model's plan with exponents for these maxima in layer 0."""
    exponents = {Site("k", 0): amax_k, Site("v", 0): amax_v}
    return make_chain().plan.with_exponents(
        {site: calibrate_exponent(torch.tensor([amax])) for site, amax in exponents.items()}
    )


def maxima(rank):
    """Exponents of plans that were calibrated apart, maxima over two batches, and parts of a matrix."""
    own = calibrated(6.0, 0.1) if rank == 0 else calibrated(2.0, 3.0)
    plan = share_exponents(own, group=dist.group.WORLD)
    seen = torch.stack([torch.tensor(6.0 if rank == 0 else 2.0), torch.tensor(1.0 if rank == 0 else 3.0)])
    parts = {}
    for scheme in SPLIT_SCHEMES:
        for split, dim in (("rows", -2), ("columns", -1)):
            x = torch.randn(2, 32, 464, generator=torch.Generator().manual_seed(5))
            x[0, 30, 450] = 90.0
            first, last = ((0, 20), (20, 32))[rank] if split == "rows" else block_spans(464, 2)[rank]
            part = quantize_part(
                x.narrow(dim, first, last - first), scheme=scheme, split=split, group=dist.group.WORLD
            )
            parts[scheme.name, split] = (part.packed, part.block_scales, part.outer)
    return {
        "digest": plan.digest,
        "own digest": own.digest,
        "exponents": plan.static_exponents,
        "largest": float(largest_of_ranks(seen, dist.group.WORLD).max()),
        "parts": parts,
    }


STATIC = PlanRules(activation="NVFP4_STATIC_POW2")


def stepped(chain, batch, records, optimizer, *, denominator, steps):
    """Guided steps of an optimizer; the last pass."""
    for _ in range(steps):
        passed = guided_pass(chain, batch, records, denominator=denominator)
        optimizer.step(grad_clip=1.0)
    return passed


def continued(model, summary):
    """A chain as a checkpoint describes it: nothing is calibrated."""
    made = remembered_plan(model, STATIC, summary=summary)
    apply(model, made, arithmetic=CONTROL)
    return Chain(model, made, CONTROL)


def saved_by_ranks(rank):
    """Two steps on two ranks, what a checkpoint keeps of them, and the third."""
    chain, samples, records = setting(rules=STATIC)
    wrap(chain.model, init_device_mesh("cpu", (2,)))
    optimizer = MasterWeightAdamW(chain.model, lr=0.01)
    ours = {"batch": chain.batch(half(samples, rank)), "records": half(records, rank), "optimizer": optimizer}
    stepped(chain, **ours, denominator=num_tokens(samples), steps=2)
    kept = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    passed = stepped(chain, **ours, denominator=num_tokens(samples), steps=1)
    return {"state": kept, "plan": json.dumps(chain.plan.summary()), "logits": passed["logits"]}


def resumed_on_ranks(rank):
    """A checkpoint that one process wrote after two steps; the third on two ranks."""
    chain, samples, records = setting(rules=STATIC)
    optimizer = MasterWeightAdamW(chain.model, lr=0.01)
    stepped(chain, chain.batch(samples), records, optimizer, denominator=num_tokens(samples), steps=2)
    state = TrainState(step=2, weight_version=2, data={}, config_digest="", plan=chain.plan.summary())
    with TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        path = Path(shared[0]) / "step_000002"
        if rank == 0:  # as one process would: without a look at the ranks
            kept = {"optimizer": optimizer.state_tensors(), "rollouts": {}, "tokenizer": None}
            save(path.parent, state=state, model=chain.model, **kept)
        dist.barrier()
        model = Qwen3MoeForCausalLM.from_pretrained(path).double()
        again = continued(model, load_state(path).plan)
        wrap(model, init_device_mesh("cpu", (2,)))
        optimizer = MasterWeightAdamW(model, lr=0.01)
        optimizer.load_state_tensors(load_optimizer(path))
        dist.barrier()
    batch = again.batch(half(samples, rank))
    passed = stepped(again, batch, half(records, rank), optimizer, denominator=num_tokens(samples), steps=1)
    return {
        "digest": again.plan.digest,
        "logits": passed["logits"],
        "seen": passed["seen"],
        "weights": whole_weights(model),
        "state": optimizer.state_tensors(),
        "shards": {type(parameter).__name__ for parameter in model.parameters()},
    }


def documented_loop(**given):
    """Run the first Python block of the document; return its names."""
    block = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="ascii"), re.DOTALL)
    names = dict(given)
    exec(compile(block.group(1), str(DOCUMENT), "exec"), names)
    return names


def trained_batches():
    """A chain, a batch for every sample with an advantage and decisions that matter, and the tokens of all."""
    chain, samples, records = setting()
    advantages = (1.0, -1.0, 0.5, -0.5)
    samples = [replace(sample, advantage=a) for sample, a in zip(samples, advantages, strict=True)]
    batches = [
        replace(chain.batch([sample]), records=(record,))
        for sample, record in zip(samples, records, strict=True)
    ]
    return chain, batches, sum(len(sample.token_ids) for sample in samples)


def document(rank):
    """The documented loop, two samples a rank, one at a time."""
    chain, batches, count = trained_batches()
    model = tiny_model(vocab_size=VOCABULARY).double()
    model.load_state_dict(chain.model.state_dict())
    names = documented_loop(
        model=model,
        plan=chain.plan,
        arithmetic=CONTROL,
        device="cpu",
        batches=batches[2 * rank : 2 * rank + 2],
        num_tokens=count,
    )
    return {"weights": names["weights"], "norm": names["step"].norm, "num_held": len(names["held"])}
