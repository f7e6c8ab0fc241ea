"""BlockTensor: shapes per scheme, views of its bytes, refusals."""

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2, NVFP4_TENSOR_POW2
from tracefp4.formats.tensor import BlockTensor


def block_tensor(scheme, outer_shape, lead=(2, 3), width=32):
    return BlockTensor(
        packed=torch.full((*lead, width // 2), 0x21, dtype=torch.uint8),
        block_scales=torch.full((*lead, width // 16), 0x38, dtype=torch.uint8),
        outer=torch.full(outer_shape, -2, dtype=torch.int8),
        scheme=scheme,
    )


@pytest.mark.parametrize(
    ("scheme", "outer_shape", "num_bytes"),
    [
        (NVFP4_ROW_POW2, (2, 3), 96 + 12 + 6),
        (NVFP4_TENSOR_POW2, (2,), 96 + 12 + 2),
        (NVFP4_KV, (), 96 + 12 + 1),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_shape_codes_scales_and_bytes(scheme, outer_shape, num_bytes):
    t = block_tensor(scheme, outer_shape)
    assert t.shape == (2, 3, 32) and t.num_bytes == num_bytes
    assert t.codes()[0, 0, :4].tolist() == [1, 2, 1, 2]
    assert t.scales().shape == (2, 3, 2) and bool((t.scales(torch.float64) == 0.25).all())


@pytest.mark.parametrize(
    ("scheme", "outer_shape"), [(NVFP4_ROW_POW2, (2,)), (NVFP4_TENSOR_POW2, (2, 3)), (NVFP4_KV, (1,))]
)
def test_an_outer_scale_of_another_scheme_is_refused(scheme, outer_shape):
    with pytest.raises(FormatError, match="needs outer"):
        block_tensor(scheme, outer_shape)


def test_ste_3_scales_of_another_size_are_refused():
    with pytest.raises(FormatError, match="needs block_scales"):
        BlockTensor(
            packed=torch.zeros(2, 16, dtype=torch.uint8),
            block_scales=torch.zeros(2, dtype=torch.uint8),
            outer=torch.zeros(2, dtype=torch.int8),
            scheme=NVFP4_ROW_POW2,
        )
