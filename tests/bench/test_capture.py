"""What is measured can be captured in a CUDA graph: while it runs, no value goes from the device to the host or back.

There is no GPU here: tensors are on a pretended device, kernels are launched and do nothing, and an operation that
would make the host wait raises.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.bench.kernel_bench import SIZES

from tracefp4.bench.kernels import all_cases
from tracefp4.ops.backend import IMPLEMENTED, Backend

ROOT = Path(__file__).parents[2]


def test_nothing_crosses_between_host_and_device():
    # In a process of its own, because a device is registered for good.
    command = [sys.executable, "-m", "tests.bench.capture_run"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    captured = json.loads(result.stdout)
    cases = [case for case in all_cases(SIZES) if not case.op or Backend.CUDA in IMPLEMENTED[case.op]]
    assert list(captured) == [case.id for case in cases]
    assert [case.id for case in cases if case.op and not captured[case.id]] == []  # each launches a kernel
