"""One tiny checkpoint and one prompt file for all tests of runs."""

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(checkpoint, prompts): built once, never written to."""
    from tests.rl import tiny_runs

    folder = tmp_path_factory.mktemp("tiny")
    return tiny_runs.make_checkpoint(folder / "start"), tiny_runs.make_prompts(folder / "prompts.jsonl")
