"""Products of four warps in the emulation: what they give, and the faults that they show."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.ops.device import KernelFile, Launch

SOURCE = Path(__file__).with_name("warpgroups.cu")
RIGHT, NOT_SHOWN, NOT_FENCED, READ_EARLY, OPERAND_OVERWRITTEN, ROWS_OVERWRITTEN = range(6)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


def run(kernel, *arguments, threads, order=0):
    library = KernelFile(SOURCE)
    library.runner = Emulator(order)
    shared_bytes = 8192 + 1024
    library.launch(Launch(kernel, (1,), threads, {}, shared_bytes), *arguments, device=torch.device("cpu"))


def product(fault=RIGHT, order=0, threads=128):
    """What the kernel gives, and the product."""
    torch.manual_seed(0)
    a, b = torch.randint(-8, 8, (2, 64, 64)).bfloat16()
    c = torch.zeros(64, 64)
    run("multiplied", a, b, c, fault, threads=threads, order=order)
    return c, a.float() @ b.float().T


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_the_product(order):
    assert torch.equal(*product(order=order))


def test_sums_are_not_there_before_they_are_awaited():
    found, _ = product(READ_EARLY)
    assert not found.any()


@pytest.mark.parametrize("fault", [OPERAND_OVERWRITTEN, ROWS_OVERWRITTEN])
def test_operands_that_change_under_way_show(fault):
    found, _ = product(fault)
    assert found.isnan().any()


@pytest.mark.parametrize(
    ("fault", "threads", "says"),
    [(NOT_SHOWN, 128, "copied and not shown"), (NOT_FENCED, 128, "did not fence"), (RIGHT, 96, "four warps")],
)
def test_what_no_gpu_promises_ends_the_kernel(fault, threads, says):
    code = f"from tests.emulation.test_warpgroups import product; product({fault}, threads={threads})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and says in done.stderr


def test_matrices_are_stored_transposed():
    given = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    found = torch.empty_like(given)
    run("stored", given, found, threads=32)
    assert torch.equal(found, given.transpose(1, 2))
