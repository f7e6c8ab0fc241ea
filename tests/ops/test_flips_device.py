"""Which values the GPU kernel of guided_quantize flips where syndromes differ, by look-ups and by a search."""

from itertools import combinations

import pytest
import torch
from tests.emulation.emulator import COMPILER, Emulator
from tests.ops.guides import ONE
from tests.ops.test_guided_quantize_device import assert_guided

from tracefp4.coding import SyndromeCode, syndrome_code
from tracefp4.formats.schemes import NVFP4_ROW_POW2
from tracefp4.ops.backend import Backend
from tracefp4.ops.guided_quantize import device as guided_device
from tracefp4.ops.guided_quantize.values import Guide
from tracefp4.ops.syndromes import encode_syndromes

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation needs g++")
BCH = syndrome_code("bch64_3")  # distance 8: at most four of 24 candidates are flipped
UNLISTED = syndrome_code("bch32_3")  # likewise, but there is no table of its columns' sums
FEW = {0: 9, 11: 20, 22: 30, 33: 40, 44: 50, 55: 60}  # position: distance in 1 / 1024
MANY = {j: 20 + j for j in range(40)}


@pytest.fixture(autouse=True, params=[0, 3])
def emulator(request, monkeypatch):
    monkeypatch.setattr(guided_device.LIBRARY, "runner", Emulator(request.param))


def assert_flipped(distances, differs, flipped, *, band=None, code=BCH, width=64):
    """A row of zeros, but for values below the boundary 0.25; its syndromes are those of bits that differ in places.
    All values of the next row are near, and none differs."""
    x, bits = (
        torch.full((2, width), 0.24),
        torch.zeros(2, -(-width // code.length) * code.length, dtype=torch.uint8),
    )
    x[0] = 0.0
    for j, c in distances.items():
        x[0, j] = 0.25 - c / 1024
    bits[0, list(differs)] = 1
    guide = Guide(
        valid=torch.ones(2, dtype=torch.bool),
        outer=torch.zeros(2, dtype=torch.int8),
        block_scales=torch.full((2, width // 16), ONE, dtype=torch.uint8),
        syndromes=encode_syndromes(bits, code=code, backend=Backend.REFERENCE),
        code=code,
        band=band,
    )
    found = assert_guided(x.bfloat16(), NVFP4_ROW_POW2, guide)
    assert found.codes.nonzero().tolist() == [[0, j] for j in flipped]
    assert int(found.undecoded) == (not flipped)


@needs_compiler
@pytest.mark.parametrize("band", [None, 0.0625], ids=["no_gate", "gate"])
@pytest.mark.parametrize("num_nearer", range(5))
def test_one_flip_behind_nearer_candidates(num_nearer, band):
    place = list(FEW)[num_nearer]
    assert_flipped(FEW, [place], [place], band=band)


@needs_compiler
@pytest.mark.parametrize("band", [None, 0.0625], ids=["no_gate", "gate"])
@pytest.mark.parametrize(
    "places", [(0, 55), (11, 22), (0, 22, 55), (22, 33, 44), (0, 11, 22, 33), (0, 22, 44, 55)]
)
def test_several_flips(places, band):
    assert_flipped(FEW, places, places, band=band)


@needs_compiler
@pytest.mark.parametrize("places", [[7], [0, 7], [0, 11, 7], [0, 11, 22, 33, 44], [0, 7, 11, 22, 33, 44]])
def test_what_no_candidate_explains_stays(places):
    """Zeros lie a quarter from their alternative: outside of the gate."""
    assert_flipped(FEW, places, [], band=0.0625)


@needs_compiler
@pytest.mark.parametrize("band", [None, 0.0625], ids=["no_gate", "gate"])
@pytest.mark.parametrize("places", [(23,), (0, 23), (0, 1, 23), (0, 10, 20, 23)])
def test_only_the_nearest_of_many_candidates_are_flipped(places, band):
    """Forty near values; the search ranks 24."""
    assert BCH.num_candidates == 24
    assert_flipped(MANY, places, places, band=band)
    assert_flipped(MANY, [j + 1 for j in places], [], band=band)


@needs_compiler
@pytest.mark.parametrize(("place", "flipped"), [(7, [7]), (19, [19]), (22 + 2, []), (63, [])])
def test_without_a_gate_values_that_are_not_near_are_flipped_up_to_the_last_rank(place, flipped):
    """Six values are near, the others are zeros: 18 of these have a rank, the last one position 21."""
    assert_flipped(FEW, [place], flipped)


@needs_compiler
@pytest.mark.parametrize("places", [(64 + 3,), (64 + 3, 64 + 20), (64 + 1, 64 + 5, 64 + 31)])
def test_the_last_block_of_a_row_is_shorter(places):
    near = {64 + 3: 1, 64 + 20: 2, 64 + 1: 3, 64 + 5: 4, 64 + 31: 5}
    assert_flipped(near, places, places, width=96)


@needs_compiler
@pytest.mark.parametrize("places", [(64 + 40,), (64 + 3, 64 + 40), (64 + 40, 64 + 41)])
def test_nothing_beyond_a_row_is_flipped(places):
    assert_flipped({64 + 3: 1, 64 + 8: 2}, places, [], width=96)


@needs_compiler
@pytest.mark.parametrize("code", [BCH, UNLISTED], ids=lambda code: code.name)
def test_of_two_sets_of_four_the_first_is_flipped(code):
    """All values lie equally near, so their order is that of their positions."""
    assert code.max_flips >= 4
    first, second = two_sets(code)
    assert_flipped(dict.fromkeys((*first, *second), 8), second, min(first, second), band=0.0625, code=code)
    nearer = {j: 8 - (j in max(first, second)) for j in (*first, *second)}
    assert_flipped(nearer, first, max(first, second), band=0.0625, code=code)
    cheaper = {**dict.fromkeys(first, 8), first[0]: 3, **dict.fromkeys(second, 7)}  # 3^2 + 3 * 8^2 > 4 * 7^2
    assert_flipped(cheaper, first, second, band=0.0625, code=code)


@needs_compiler
@pytest.mark.parametrize("places", [(3, 63), (3, 17, 63), (3, 17, 40, 63)])
def test_flips_with_the_last_column(places):
    """The table is asked for sums of two columns with that one added: here it is one of those wanted, or of four."""
    assert_flipped({3: 9, 17: 20, 40: 30, 63: 40}, places, places, band=0.0625)


@needs_compiler
@pytest.mark.parametrize("places", [(3, 17, 40, 5), (17, 40, 5, 6), (40, 5, 6, 7)])
def test_four_flips_are_candidates_all(places):
    assert_flipped({3: 9, 17: 20, 40: 30}, places, [], band=0.0625)


def two_sets(code: SyndromeCode) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two sets of four positions whose columns have the same XOR."""
    found: dict[int, tuple[int, ...]] = {}
    for places in combinations(range(min(40, code.length)), 4):
        a, b, c, d = (code.columns[j] for j in places)
        other = found.setdefault(a ^ b ^ c ^ d, places)
        if not set(other) & set(places):
            return other, places
    raise AssertionError("no two sets")


@needs_compiler
@pytest.mark.parametrize(
    ("distances", "flipped"),
    [
        ({0: 9, 1: 4, 2: 5, 3: 6}, [1, 2, 3]),  # 4^2 + 5^2 + 6^2 < 9^2
        ({0: 8, 1: 4, 2: 5, 3: 6}, [0]),
        ({0: 9, 1: 4, 2: 6, 3: 7}, [0]),
        ({1: 4, 2: 6, 3: 7}, [1, 2, 3]),
    ],
)
def test_one_flip_against_three_cheaper_candidates(distances, flipped):
    """The code secded, columns 16 + j: column 0 is the XOR of columns 1, 2 and 3."""
    assert_flipped(distances, [0], flipped, band=0.0625, code=syndrome_code("secded"), width=16)
