"""What every test gets: fixed seeds and examples, and poisoned memory where an op could read what it never wrote."""

import os
import random
import sys

import pytest
from hypothesis import settings

# Before any test module is imported, because `settings(...)` there takes the rest from the profile in force.
settings.register_profile("fixed", derandomize=True, database=None)
settings.register_profile("explore", derandomize=False, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Rooms whose code allocates outputs itself: torch.empty there returns NaN and a large integer.
POISONED_ROOMS = ("formats", "ops", "guidance", "kvcache", "golden")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    room = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    torch = sys.modules.get("torch")
    if torch is None or room not in POISONED_ROOMS:
        return
    # Under a default device, torch looks for functions that make tensors in a list that it makes once. If it were made
    # while torch.empty is replaced, torch.empty would ignore default devices from then on, "meta" among them.
    with torch.device("cpu"):
        torch.empty(0)

    def poison(make):
        def make_poisoned(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type != "cpu" or tensor.numel() == 0:
                return tensor
            with torch.no_grad():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                elif tensor.dtype != torch.bool:
                    tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return make_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
