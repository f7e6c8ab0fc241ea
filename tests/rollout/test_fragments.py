"""An engine whose pages are in fragment order, as on a GPU, does what one with plain pages does: with a prefix cache,
swapping, and pages written from records. The ops are the references; what is tested is that nobody else reads bytes."""

from dataclasses import replace

from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, make_prompts, outputs, sampled

from tracefp4.formats.fragments import FragmentPages
from tracefp4.ops.backend import Backend


def test_pages_in_fragment_order_change_nothing(monkeypatch):
    model = tiny_model(head_dim=64)
    prompts, params = make_prompts(4, shortest=18, longest=40), sampled(30, n=2, seed=1)
    sizes = {"page_size": 16, "num_pages": 14, "max_swapped_pages": 1, "prefix_cache": True}

    def run():
        engine = make_engine(model, **sizes)
        row = engine.generate(prompts, params)
        return engine, [*row, engine.extend([c[0] for c in row], [[1], [2], [3], [4]], sampled(3))]

    plain, expected = run()
    monkeypatch.setattr("tracefp4.kvcache.pool.choose", lambda op, device: Backend.CUDA)
    engine, found = run()
    assert isinstance(engine.pool.layers[0].keys, FragmentPages) and engine.pool.layers[1].values.kind == "v"
    assert outputs(found) == outputs(expected)
    assert replace(engine.stats, seconds=0.0) == replace(plain.stats, seconds=0.0)
    assert min(engine.stats.pages_swapped_out, engine.stats.positions_restored, engine.stats.prefix_hits) > 0
    for row, wanted in zip(found, expected, strict=True):
        for a, b in zip(row, wanted, strict=True):
            for site, part in a.record.sites.items():
                assert bool((part.payload == b.record.sites[site].payload).all())
