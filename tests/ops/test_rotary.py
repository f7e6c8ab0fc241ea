"""rotary against the engine's arithmetic and float64; its GPU kernel against the reference, in any order of threads."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.emulation.emulator import COMPILER, Emulator

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats.arithmetic import NATIVE
from tracefp4.models.rotary import RotaryTable, rotate
from tracefp4.ops import device as ops_device
from tracefp4.ops import nvrtc
from tracefp4.ops.backend import Backend
from tracefp4.ops.norms import rms_normed
from tracefp4.ops.rotary import Angles, HeadNorms, rotary
from tracefp4.ops.rotary import device as rotary_device
from tracefp4.ops.rotary.device import Case, differences, rotary_on_device
from tracefp4.ops.rotary.reference import rotary_reference

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
CPU = torch.device("cpu")


@pytest.fixture(params=[0, 1, 2, 3])
def emulator(request, monkeypatch):
    emulator = Emulator(request.param)
    monkeypatch.setattr(rotary_device.LIBRARY, "runner", emulator)
    return emulator


def operands(num_tokens, num_q, num_k, head_dim, *, length=40):
    """Views into one projection, weights, tables, positions."""
    torch.manual_seed(0)
    heads = num_q + 2 * num_k
    qkv = (
        torch.randn(num_tokens, heads * head_dim) * 2.0 ** torch.randint(-9, 9, (num_tokens, 1))
    ).bfloat16()
    sizes = [n * head_dim for n in (num_q, num_k, num_k)]
    q, k, _ = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, 1))
    norms = HeadNorms(torch.randn(head_dim).bfloat16(), torch.randn(head_dim).bfloat16(), 1e-6)
    angles = Angles(torch.randn(length, head_dim).bfloat16(), torch.randn(length, head_dim).bfloat16())
    return q, k, norms, angles, torch.randint(0, length, (num_tokens,))


def assert_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert one.is_contiguous() and torch.equal(one.isnan(), other.isnan())
        assert_bitwise(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_the_reference_is_the_engine_s():
    q, k, norms, _, _ = operands(7, 4, 2, 64)
    positions = torch.tensor([0, 1, 5, 900, 4095, 17, 3])
    table = RotaryTable(64, theta=1e6, arithmetic=NATIVE, device=CPU)
    cos, sin = table.rows(positions)
    every = table.rows(torch.arange(4096))
    angles = Angles(every[0][:, 0], every[1][:, 0])
    got = rotary(q, k, norms=norms, angles=angles, positions=positions)
    wanted = [rotate(rms_normed(x, weight, 1e-6), cos, sin) for x, weight in ((q, norms.q), (k, norms.k))]
    assert_same(got, wanted)
    x = q.double() * (q.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norms.q.double()
    size = x.square().add(x.roll(32, -1).square()).sqrt()
    assert bool(((got[0].double() - rotate(x, cos.double(), sin.double())).abs() <= size * 2.0**-5).all())


@needs_compiler
@pytest.mark.parametrize("sizes", [(5, 4, 2), (1, 1, 1), (0, 4, 2), (19, 3, 1)], ids=str)
def test_bytes_are_those_of_the_reference(emulator, sizes):
    given = operands(*sizes, 64)
    assert_same(rotary_on_device(*given), rotary_reference(*given))
    assert sizes[0] == 0 or emulator.launches == {"norm_and_rotate": 1}


@needs_compiler
def test_heads_without_a_norm_are_only_turned(emulator):
    q, k, _, angles, positions = operands(5, 4, 2, 64)
    given = (q, k, None, angles, positions)
    assert_same(rotary_on_device(*given), rotary_reference(*given))
    cos, sin = (table[positions][:, None] for table in angles)
    assert_same(rotary_reference(*given), [rotate(x.clone(), cos, sin) for x in (q, k)])
    assert differences(CPU, Case(64, False)) is None


@needs_compiler
def test_heads_that_lie_in_one_projection_are_not_copied(emulator, monkeypatch):
    q, k, *rest = operands(3, 4, 2, 64)
    wanted = rotary_reference(q, k, *rest)
    monkeypatch.setattr(ops_device, "aligned", lambda x: x if x.dim() < 3 else pytest.fail("copied"))
    assert_same(rotary_on_device(q, k, *rest), wanted)


@needs_compiler
def test_unaligned_heads_and_positions_outside_of_the_tables(emulator):
    q, k, norms, angles, positions = operands(4, 2, 1, 64)
    q = torch.nn.functional.pad(q.flatten(1), (1, 0))[:, 1:].unflatten(1, (2, 64))
    positions[1], positions[2] = 40, -1
    q[3, 1, 5], k[3, 0, 60] = float("nan"), float("inf")
    got, wanted = (f(q, k, norms, angles, positions) for f in (rotary_on_device, rotary_reference))
    assert_same(got, wanted)
    assert bool(got[0][1:3].isnan().all()) and not bool(got[0][3, 0].isnan().any())


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 32, 128, 256, 512])
def test_every_width_of_a_head(monkeypatch, head_dim):
    monkeypatch.setattr(rotary_device.LIBRARY, "runner", Emulator())
    given = operands(3, 4, 2, head_dim)
    assert_same(rotary_on_device(*given), rotary_reference(*given))
    assert differences(CPU, Case(head_dim, True)) is None


def test_operands_that_do_not_fit_are_refused():
    q, k, norms, angles, positions = operands(2, 4, 2, 64)
    rest = {"norms": norms, "angles": angles, "positions": positions}
    for wrong in ((q.float(), k), (q, k[:1]), (q[..., :48], k[..., :48]), (q[0], k[0])):
        with pytest.raises(FormatError, match="rotary needs bfloat16 q"):
            rotary(*wrong, **rest)
    for part in (
        {"positions": positions[:1]},
        {"positions": positions.int()},
        {"angles": Angles(angles.cos[:3], angles.sin)},
        {"norms": norms._replace(q=norms.q[:32])},
        {"norms": norms._replace(k=norms.k.float())},
    ):
        with pytest.raises(FormatError, match="rotary needs bfloat16 weights"):
            rotary(q, k, **rest | part)
    with pytest.raises(BackendError, match="rotary cannot run CUDA here"):
        rotary(q, k, **rest, backend=Backend.CUDA)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_the_file_compiles_for(architecture):
    source = rotary_device.LIBRARY.program.source
    assert (
        nvrtc.build(source, defines={"TEAM": 8, "NORMS": 1}, architecture=architecture).code[:4] == b"\x7fELF"
    )
