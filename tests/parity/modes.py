"""One set of samples through the trainer's model in every mode, and all that the modes must agree on, by token.

A run collects, for every token of every sample whatever row and column it had: its logits, what each site made of it
(codes, block scales, exponents) and which experts it went to; and the gradients of all parameters. The loss is a
fixed random weighting of every logit, so it does not depend on the mode either.
"""

import threading
from dataclasses import dataclass, field

import torch
from tests.parity.chains import VOCABULARY, make_chain, shifted
from torch.utils.checkpoint import checkpoint

from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.session import current, replay
from tracefp4.qat import attention, emulation, experts
from tracefp4.rl.packing import pack

# sums over tokens in another order, in float64, relative to the largest gradient of the parameter
GRADIENT = 1e-12


def make_setting(**changes):
    """A chain in control arithmetic, five samples, and records whose decisions differ from nearest ones."""
    chain = make_chain(**changes)
    samples = chain.rollouts(num_prompts=5, max_tokens=9)
    records = [shifted(sample.record).recode("mantissa") for sample in samples]
    return chain, samples, records


@dataclass
class Seen:
    """What one mode did, with rows in the order of the samples' tokens."""

    samples: list
    logits: torch.Tensor = None
    rows: dict = field(default_factory=dict)
    reads: dict = field(default_factory=dict)
    gradients: list = None
    straight: int = 0

    def offsets(self):
        starts, total = {}, 0
        for sample in self.samples:
            starts[sample.trajectory] = total
            total += sample.num_tokens
        return starts, total

    def keep(self, name, values, batch):
        """Store the rows of real places; a second look at the same place must see the same bytes."""
        starts, total = self.offsets()
        places = batch.positions.numel()
        values = values.detach().reshape(places, -1)
        kept, known = self.rows.setdefault(
            name,
            (torch.zeros(total, values.shape[1], dtype=values.dtype), torch.zeros(total, dtype=torch.bool)),
        )
        owners = batch.record_index
        if owners is None:
            owners = torch.arange(len(batch.positions))[:, None].expand_as(batch.positions)
        real = batch.positions.reshape(-1) >= 0
        first = torch.tensor([starts[record.identity.trajectory] for record in batch.records])
        rows = (first[owners.reshape(-1)] + batch.positions.reshape(-1))[real]
        again = known[rows]
        assert torch.equal(kept[rows][again], values[real][again]), (
            f"{name} was decided otherwise the second time"
        )
        kept[rows], known[rows] = values[real], True
        self.reads[name] = self.reads.get(name, 0) + int(real.sum())


def running_batch():
    """The batch that the running session replays."""
    session = current()
    assert session is not None and session.batch is not None, "a site ran outside its session"
    return session.batch


class Spy:
    """Stands in front of the sites of the patched modules, looks at what they answer, and checks their gradients."""

    def __init__(self, monkeypatch, seen):
        self.seen = seen
        for module in (attention, experts):
            real = module.round_site
            monkeypatch.setattr(
                module, "round_site", lambda x, real=real, **kw: self.round_site(real, x, **kw)
            )
            through = module.straight_through
            monkeypatch.setattr(
                module,
                "straight_through",
                lambda x, y, real=through, **kw: self.straight_through(real, x, y, **kw),
            )
        route = emulation.route_site
        monkeypatch.setattr(emulation, "route_site", lambda *a, **kw: self.route_site(route, *a, **kw))

    def round_site(self, real, x, *, site, **options):
        rounded = real(x, site=site, **(options | {"with_codes": True}))
        batch = running_batch()
        self.seen.keep((site.kind, site.layer, "codes"), rounded.codes, batch)
        self.seen.keep((site.kind, site.layer, "scales"), rounded.block_scales, batch)
        if torch.is_tensor(rounded.outer) and rounded.outer.dim():
            self.seen.keep((site.kind, site.layer, "exponents"), rounded.outer, batch)
        return rounded

    def route_site(self, real, layer, logits, **options):
        ids = real(layer, logits, **options)
        self.seen.keep(("routed", layer), ids, running_batch())
        return ids

    def straight_through(self, real, x, x_hat, **options):
        """The gradient that leaves a site is, bit for bit, the one that came in."""
        if not x.requires_grad:
            return real(x, x_hat, **options)
        alone = x.view_as(x)
        arrived = []
        y = real(alone, x_hat, **options)
        if y.requires_grad and not isinstance(x, torch.nn.Parameter):
            y.register_hook(arrived.append)
            alone.register_hook(lambda grad: self.compare(grad, arrived))
        return y

    def compare(self, grad, arrived):
        assert torch.equal(grad, sum(arrived)), "the estimator is not the identity"
        self.seen.straight += 1


@dataclass(frozen=True)
class Mode:
    """How samples become passes. The default is one right-padded batch."""

    sizes: tuple = (5,)
    order: tuple = (0, 1, 2, 3, 4)
    padding: tuple = ()
    layout: str = "padded"  # or "packed", "masked" (packed, kept apart by the mask alone)
    recompute: str = ""  # or "reentrant", "non-reentrant", "by hand"
    backward: str = "inside"  # or "outside", "late" (all forwards first, backwards in reverse), "thread"
    compiler: str = ""


def run(setting, mode, monkeypatch):
    """All that one mode does to the samples."""
    chain, samples, records = setting
    seen = Seen(samples)
    with monkeypatch.context() as patch:
        Spy(patch, seen)
        chain.model.zero_grad()
        _recompute(chain.model, mode.recompute, patch)
        try:
            _passes(chain, seen, records, mode)
        finally:
            chain.model.gradient_checkpointing_disable()
            chain.model.eval()
    seen.gradients = [parameter.grad.clone() for parameter in chain.model.parameters()]
    assert all(known.all() for _, known in seen.rows.values())
    return seen


def _recompute(model, kind, patch):
    if kind:
        model.train()
    if kind in ("reentrant", "non-reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    if kind == "by hand":
        for layer in model.model.layers:
            inner = layer.forward
            patch.setattr(
                layer,
                "forward",
                lambda *args, inner=inner, **kw: checkpoint(inner, *args, use_reentrant=False, **kw),
                raising=False,
            )


def _passes(chain, seen, records, mode):
    model = torch.compile(chain.model, backend=mode.compiler) if mode.compiler else chain.model
    weights = torch.randn(
        seen.offsets()[1], VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    todo, begin = [], 0
    for size in mode.sizes:
        chosen = mode.order[begin : begin + size]
        begin += size
        batch = chain.batch([seen.samples[i] for i in chosen], **dict(mode.padding))
        replayed, inputs = _inputs(batch, [records[i] for i in chosen], mode.layout)
        with replay(replayed):
            logits = model(**inputs, use_cache=False).logits
            seen.keep("logits", logits, replayed)
            loss = (logits.reshape(-1, VOCABULARY) * _placed(weights, seen, replayed)).sum()
            if mode.backward == "inside":
                loss.backward()
        if mode.backward == "outside":
            loss.backward()
        todo.append(loss)
    if mode.backward in ("late", "thread"):
        _backwards(todo[::-1], on_thread=mode.backward == "thread")


def _backwards(losses, *, on_thread):
    def work():
        for loss in losses:
            loss.backward()

    if not on_thread:
        work()
        return
    failed = []
    thread = threading.Thread(target=lambda: failed.append(_outcome(work)))
    thread.start()
    thread.join()
    if failed[0] is not None:
        raise failed[0]


def _outcome(work):
    try:
        work()
    except BaseException as error:
        return error
    return None


def _inputs(batch, records, layout):
    if layout == "padded":
        replayed = ReplayBatch(positions=batch.positions, records=records)
        return replayed, {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "position_ids": batch.model_positions(),
        }
    row = pack(batch)
    replayed = ReplayBatch(positions=row.positions, records=records, record_index=row.record_index)
    inputs = {"input_ids": row.input_ids, "position_ids": row.positions}
    return replayed, inputs | ({"segment_lengths": row.lengths} if layout == "packed" else {})


def _placed(weights, seen, batch):
    """The weights of every place of a batch, 0 at padding: [places, V]."""
    starts, _ = seen.offsets()
    owners = batch.record_index
    if owners is None:
        owners = torch.arange(len(batch.positions))[:, None].expand_as(batch.positions)
    first = torch.tensor([starts[record.identity.trajectory] for record in batch.records])
    flat = batch.positions.reshape(-1)
    rows = (first[owners.reshape(-1)] + flat).clamp(min=0)
    return torch.where((flat >= 0)[:, None], weights[rows], 0.0)


def assert_same_decisions(found, expected):
    """The same bytes at every token: logits, codes, scales, exponents, experts."""
    assert found.rows.keys() == expected.rows.keys()
    for name, (values, _) in expected.rows.items():
        assert found.rows[name][0].dtype == values.dtype
        assert torch.equal(found.rows[name][0], values), name


def assert_close_gradients(found, expected):
    """Equal up to the order of float64 sums."""
    for got, wanted in zip(found.gradients, expected.gradients, strict=True):
        assert (got - wanted).abs().max() <= GRADIENT * wanted.abs().max()
