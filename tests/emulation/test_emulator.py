"""The emulation shows the faults that it is there for, and its instructions are those of the PTX manual."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.ops.device import KernelFile, Launch, packed_arguments

FAULTS = Path(__file__).with_name("faults.cu")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")


def run(kernel, *arguments, threads=64, shared_bytes=0, order=0, grid=(1,)):
    library = KernelFile(FAULTS)
    library.runner = Emulator(order)
    library.launch(Launch(kernel, grid, threads, {}, shared_bytes), *arguments, device=CPU)
    return library.runner


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_barrier_makes_every_order_of_threads_the_same(order):
    given, found = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run("shift", given, found, 1, order=order)
    assert torch.equal(found, given.roll(-1))
    run("overtaken", given, found, 1, order=order)
    assert torch.equal(found, given.roll(-32))


def test_a_warp_that_runs_ahead_shows_what_warps_in_step_hide():
    given, found = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run("overtaken", given, found, 0, order=0)
    assert torch.equal(found, given.roll(-32))
    run("overtaken", given, found, 0, order=3)
    assert bool((found == -7).any())


def test_a_missing_barrier_shows_as_poison():
    given, found = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run("shift", given, found, 0)
    assert found[:63].tolist() == [-1] * 63 and found[63] == 0


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_warps_that_await_one_another_hand_over_everything(order):
    given, found = torch.arange(160, dtype=torch.int32), torch.empty(160, dtype=torch.int32)
    run("handed", given, found, 5, 3, order=order)
    assert torch.equal(found.view(5, 16, 2), given.view(5, 16, 2).flip(2))


def test_a_warp_that_does_not_await_the_other_shows():
    given, found = torch.arange(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    run("handed", given, found, 1, 0, order=1)
    assert bool((found == -1).any())


def test_copies_arrive_when_they_are_awaited_and_not_before():
    given, found = torch.arange(256, dtype=torch.int32), torch.empty(256, dtype=torch.int32)
    run("copied", given, found, 1, shared_bytes=1024)
    assert torch.equal(found.view(32, 2, 4), given.view(32, 2, 4).flip(1))
    run("copied", given, found, 0, shared_bytes=1024)
    assert bool((found == -1).any())


def test_a_thread_that_waits_for_ever_is_reported():
    code = (
        "import torch; from tests.emulation.test_emulator import run; "
        "run('lonely_lanes', torch.zeros(64, dtype=torch.int32))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "waits for a thread that never comes" in done.stderr


@pytest.mark.parametrize("launch", [{"threads": 48}, {"threads": 2048}, {"shared_bytes": 1 << 20}])
def test_launches_that_no_gpu_accepts(launch):
    given = torch.zeros(4096, dtype=torch.int32)
    with pytest.raises(AssertionError, match="no GPU accepts"):
        run("copied", given, given.clone(), 1, **launch)


def test_an_empty_grid_runs_nothing():
    assert run("shift", None, None, 1, grid=(0, 3)).launches == {}


def test_the_matrix_product():
    torch.manual_seed(0)
    a, b = torch.randint(-8, 8, (16, 16)).half(), torch.randint(-8, 8, (16, 8)).half()
    c = torch.empty(16, 8)
    run("product", a, b, c, threads=32)
    assert torch.equal(c, a.float() @ b.float())


def test_matrices_from_shared_memory():
    given = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    found = torch.empty(2, 4, 8, 8, dtype=torch.int16)
    run("matrices", given, found, threads=32)
    assert torch.equal(found[0], given) and torch.equal(found[1], given.transpose(1, 2))


def test_what_a_warp_or_a_block_combines():
    given = torch.randint(-(2**20), 2**20, (64,), dtype=torch.int32)
    smallest, bits = torch.empty(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    run("combined", given, smallest, bits)
    assert torch.equal(smallest.view(2, 32), given.view(2, 32).amin(1, keepdim=True).expand(2, 32))
    every = 0
    for number in given.tolist():
        every |= number
    assert bits.item() == every


def test_an_operand_that_breaks_a_promise_ends_the_kernel():
    code = (
        "import torch; from tests.emulation.test_emulator import run; "
        "run('refused', torch.arange(64, dtype=torch.int32), 63)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "thread 63 breaks what its op promises" in done.stderr


def test_conversions_and_the_transposed_matrix():
    words = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    found = torch.empty(32, 4, dtype=torch.int32)
    run("converted", words, found, threads=32)
    two = words.view(torch.uint8).view(32, 4)[:, :2].contiguous().view(torch.float8_e4m3fn).half()
    assert torch.equal(
        found[:, 0].contiguous().view(torch.float16).view(32, 2).nan_to_num(7.0), two.nan_to_num(7.0)
    )
    matrix = words.view(torch.int16).view(8, 8)
    assert torch.equal(found[:, 1].contiguous().view(torch.int16).view(8, 8), matrix.T)
    floats = words.view(torch.float32)
    bf16 = found[:, 2].contiguous().view(torch.bfloat16).view(32, 2)
    assert torch.equal(bf16[:, 0].nan_to_num(7.0), floats.bfloat16().nan_to_num(7.0)) and bool(
        (bf16[:, 1] == 1).all()
    )
    half = found[:, 3].contiguous().view(torch.float16).view(32, 2)
    assert torch.equal(half[:, 0].nan_to_num(7.0), floats.half().nan_to_num(7.0)) and bool(
        (half[:, 1] == -2).all()
    )


def test_arguments_are_32_bit_or_addresses():
    with pytest.raises(OverflowError, match="32-bit"):
        packed_arguments((2**31,))
    x = torch.zeros(3)
    address, null, five, half = packed_arguments((x, None, -5, 0.5))
    found = [value.value for value in (address, null, five, half)]
    assert found == [x.data_ptr(), None, -5, 0.5]
