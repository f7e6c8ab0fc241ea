import threading
from pathlib import Path

import pytest
import torch
from tests.guidance.sample_records import TOP_K, WIDTH, X0, X1, activations, recorded, round_at
from torch.utils.checkpoint import checkpoint

import tracefp4.guidance
from tracefp4.errors import ConfigError
from tracefp4.guidance import ReplayBatch, StepLog, bind, current, route_site
from tracefp4.guidance.session import record, replay


class Straight(torch.autograd.Function):
    """Forward: the site's values; backward: identity."""

    @staticmethod
    def forward(ctx, x, site):
        return round_at(site, x).values

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def layer(weight, x):
    """Two guided sites and a router, as one expert layer has."""
    hidden = Straight.apply(x, X0) @ weight
    ids = route_site(0, hidden[:, :8], top_k=TOP_K)
    return (Straight.apply(hidden, X1) @ weight) * ids.sum(-1, keepdim=True)


def micro_batches():
    """Two micro-batches of other trajectories whose trainer values are noisy."""
    found = []
    for trajectory in range(2):
        batch = ReplayBatch(positions=torch.arange(6)[None], records=[recorded(trajectory, length=6)])
        noise = 0.02 * torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(trajectory))
        found.append((batch, activations(trajectory, range(6)) + noise))
    return found


def gradient(run):
    weight = (0.3 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))).requires_grad_()
    run(weight)
    return weight.grad


def plain(weight):
    for batch, x in micro_batches():
        with replay(batch):
            layer(weight, x).square().sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_rpl_1_checkpointing_inside_the_session_gives_equal_gradients(use_reentrant):
    def checkpointed(weight):
        for batch, x in micro_batches():
            with replay(batch):
                checkpoint(layer, weight, x, use_reentrant=use_reentrant).square().sum().backward()

    assert torch.equal(gradient(plain), gradient(checkpointed))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_rpl_1_bound_checkpoints_may_run_backward_later_and_in_any_order(use_reentrant, order):
    batches = micro_batches()

    def checkpointed(weight):
        losses = []
        for batch, x in batches:
            with replay(batch):
                losses.append(checkpoint(bind(layer), weight, x, use_reentrant=use_reentrant).square().sum())
        for index in order:
            losses[index].backward()

    expected, found = gradient(plain), gradient(checkpointed)
    assert torch.equal(expected, found)
    for batch, _ in batches:
        assert batch.counters.sites[X0].positions_guided == 6


def test_rpl_1_the_test_above_can_fail():
    def unbound(weight):
        losses = []
        for batch, x in micro_batches():
            with replay(batch):
                losses.append(checkpoint(layer, weight, x, use_reentrant=True).square().sum())
        for loss in losses:
            loss.backward()

    assert not torch.equal(gradient(plain), gradient(unbound))


def test_rpl_3_sessions_own_their_records_and_nothing_is_registered():
    first, second = (batch for batch, _ in micro_batches())
    with replay(first):
        round_at(X0, activations(0, range(6)))
    del first
    with replay(second):
        guided = round_at(X0, activations(1, range(6)))
    assert torch.equal(guided.codes, round_at(X0, activations(1, range(6))).codes)
    assert current() is None


def test_exactly_one_context_variable():
    folder = Path(tracefp4.guidance.__file__).parent
    sources = [path.read_text() for path in folder.glob("*.py")]
    assert sum(source.count("ContextVar(") for source in sources) == 1


def test_sessions_do_not_nest_and_end_with_an_exception():
    log = StepLog(sites=[X0])
    batch = ReplayBatch(positions=torch.arange(2)[None], records=[None])
    with record(log):
        assert current().sink is log
        for inner in (record(log), replay(batch)):
            with pytest.raises(ConfigError, match=r"inside `with record"), inner:
                pass
    with replay(batch):
        assert current().batch is batch
        with pytest.raises(ConfigError, match=r"inside `with replay"), record(log):
            pass
    with pytest.raises(KeyError), replay(batch):
        raise KeyError
    assert current() is None


def test_a_bound_function_carries_its_session_to_another_thread():
    batch = ReplayBatch(positions=torch.arange(2)[None], records=[None])
    seen = []
    with replay(batch):
        free, bound = (lambda: seen.append(current())), bind(lambda: seen.append(current().batch))
        for target in (free, bound):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [None, batch]
    bind(lambda: seen.append(current()))()
    assert seen[-1] is None
