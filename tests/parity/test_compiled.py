"""A compiled trainer: the same bytes as without a compiler, and a number of graphs that does not grow with shapes.

`eager` runs the graphs that the compiler traced, `aot_eager` also its own forward, backward and functionalization;
`inductor` (slow) generates code. Gradients of the last two may add up in another order.
"""

from contextlib import contextmanager

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from tests.parity.modes import Mode, assert_close_gradients, assert_same_decisions, make_setting, run
from torch._dynamo.utils import counters

from tracefp4.formats.arithmetic import NATIVE
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.guidance import Site, round_site
from tracefp4.qat import straight_through
from tracefp4.qat.opaque import opaque

# at a site inside a decoder layer: its session, attention, router, experts
BREAKS = ("_give_session", "_layer_forward", "attention_forward", "router_forward", "experts_forward")
# kinds of shapes that the compiler tells apart: the first one, any other, one row, several rows
SHAPES = 4


@pytest.fixture(scope="module")
def setting():
    return make_setting(num_hidden_layers=1)


@pytest.fixture(scope="module")
def whole(setting):
    with pytest.MonkeyPatch.context() as patch:
        return run(setting, Mode(), patch)


@contextmanager
def fresh_compiler():
    """Nothing compiled before, and an error where the compiler would fall back in silence."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def breaks():
    return {name for reason in counters["graph_break"] for name in BREAKS if f"<function {name} " in reason}


def test_a_compiled_trainer_decides_the_same(setting, whole, monkeypatch):
    # Mutations: a site that is traced; rounding in place that a graph loses.
    with fresh_compiler():
        found = run(setting, Mode(compiler="eager"), monkeypatch)
        assert_same_decisions(found, whole)
        assert_close_gradients(found, whole)
        assert breaks() == set(BREAKS)
        assert len(counters["graph_break"]) == len(BREAKS), list(counters["graph_break"])


def test_res_3_a_site_in_a_compiled_function_has_few_graphs_whatever_its_shapes():
    # Mutation: a site that is traced, with guards on every number of rows.
    rounds = opaque(round_site)

    def twice_rounded(x):
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        rounded = rounds(rows, site=Site("x", 0), scheme=NVFP4_ROW_POW2)
        return straight_through(x, rounded.values.view_as(x)) * 2

    shapes = (
        [(n, 64) for n in range(1, 41)] + [(2, n, 64) for n in range(1, 9)] + [(4, 2, n, 64) for n in (1, 5)]
    )
    with fresh_compiler(), torch._dynamo.config.patch(recompile_limit=8):
        compiled = torch.compile(twice_rounded, backend="eager")
        for shape in shapes:
            x = torch.randn(shape).requires_grad_()
            found = compiled(x)
            expected = rounds(x.detach().reshape(-1, 64), site=Site("x", 0), scheme=NVFP4_ROW_POW2).values
            assert torch.equal(found, 2 * expected.view(shape))
            found.sum().backward()
            assert torch.equal(x.grad, torch.full(shape, 2.0))
        assert counters["stats"]["unique_graphs"] <= 16, counters["stats"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "masked"])
def test_a_compiled_trainer_decides_the_same_in_packed_rows(setting, whole, layout, monkeypatch):
    # Mutation: positions that a graph has frozen.
    with fresh_compiler():
        mode = Mode(compiler="eager", layout=layout, sizes=(2, 3), order=(1, 4, 0, 2, 3))
        found = run(setting, mode, monkeypatch)
    assert_same_decisions(found, whole)
    assert_close_gradients(found, whole)


@pytest.mark.slow
def test_res_3_graphs_do_not_grow_with_shapes_or_layers(monkeypatch):
    # Mutations: guards on a layer's number, on a session, on the number of tokens.
    graphs = {}
    for num_layers in (1, 9):
        deep = make_setting(num_hidden_layers=num_layers)
        with fresh_compiler():
            sizes = [Mode(compiler="eager", sizes=sizes) for sizes in ((5,), (3, 2), (1, 1, 3), (2, 1, 2))]
            for mode in sizes:
                run(deep, mode, monkeypatch)
            graphs[num_layers] = counters["stats"]["unique_graphs"]
            seen = graphs[num_layers]
            for extra in range(1, 6):
                run(deep, Mode(compiler="eager", padding=(("left_extra", extra),), sizes=(4, 1)), monkeypatch)
            assert counters["stats"]["unique_graphs"] == seen, "more shapes, no more graphs"
    per_shape = graphs[1] / SHAPES
    assert graphs[9] <= graphs[1] + 2 * SHAPES and per_shape < 16, graphs


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_rpl_1_compiled_layers_recompute_under_their_own_session(setting, whole, recompute, monkeypatch):
    # Mutation: a compiled recomputation that asks the running session.
    with fresh_compiler():
        mode = Mode(
            compiler="eager", sizes=(2, 3), order=(1, 4, 0, 2, 3), recompute=recompute, backward="late"
        )
        found = run(setting, mode, monkeypatch)
    assert_same_decisions(found, whole)
    assert_close_gradients(found, whole)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_code_that_a_compiler_made_decides_the_same(setting, whole, backend, monkeypatch):
    # Mutation: a backward that a compiler fills with another pass's roundings.
    with fresh_compiler():
        found = run(setting, Mode(compiler=backend), monkeypatch)
    assert_same_decisions(found, whole)
    assert_close_gradients(found, whole)


@pytest.mark.slow
def test_inductor_gives_the_same_bytes_in_native_bf16_where_it_keeps_casts(monkeypatch):
    # Without the option inductor leaves intermediates of a fused kernel in float32: other codes, as with any kernel.
    setting = make_setting(num_hidden_layers=1, arithmetic=NATIVE)
    plain = run(setting, Mode(), monkeypatch)
    with fresh_compiler(), torch._inductor.config.patch(emulate_precision_casts=True):
        found = run(setting, Mode(compiler="inductor"), monkeypatch)
    assert_same_decisions(found, plain)
