"""Fixtures of the store's tests."""

import tempfile
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory where there is one: writes cost little and syncs nothing; a kill needs no medium."""
    if not SHARED_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="tracefp4-test-") as path:
        yield Path(path)
