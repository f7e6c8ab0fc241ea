"""The kernels themselves, emulated on the processor, pass the checks of the suite under its tolerances."""

from dataclasses import replace

import pytest
import torch
from tests.bench.kernel_bench import SIZES, device_libraries, suite
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.bench.kernels import all_cases
from tracefp4.ops import backend
from tracefp4.ops.backend import Backend
from tracefp4.ops.kernels import Status

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")]


def test_every_kernel_passes_its_check(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    monkeypatch.setattr(backend, "_status", lambda op, asked, device, case=None: Status(True, "emulated"))
    emulator = Emulator()
    for library in device_libraries():
        monkeypatch.setattr(library, "runner", emulator)
    emulated = suite()
    emulated = replace(emulated, bench=replace(emulated.bench, backend=Backend.CUDA), num_replays=1)
    cases = [case for case in all_cases(SIZES) if case.op]
    found = emulated.run(cases)
    assert (found.failed, found.missing) == ({}, {}) and len(found.rows) == len(cases)
    wrong = {row.id: row.check for row in found.rows if not row.check.holds}
    assert wrong == {} and sum(emulator.launches.values()) > len(cases)
