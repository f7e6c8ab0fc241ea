"""What numbers exist: element formats, block formats, schemes, scales, packing, and the quantized tensor as
data.

Pure data and elementwise torch; no kernels, no backend choice, no device code.
"""

from tracefp4.formats.arithmetic import CONTROL, EMULATED, NATIVE, Arithmetic, round_bf16, round_bf16_
from tracefp4.formats.block import MXFP4, NVFP4, BlockFormat
from tracefp4.formats.calibration import calibrate_exponent
from tracefp4.formats.element import E2M1, E4M3, E8M0, FloatFormat
from tracefp4.formats.precision import BF16_LAYER, LayerPrecision
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.schemes import (
    MXFP4_CEIL,
    MXFP4_EVEN,
    MXFP4_FLOOR,
    MXFP4_RCEIL,
    NVFP4_KV,
    NVFP4_ROW_FP32,
    NVFP4_ROW_POW2,
    NVFP4_STATIC_POW2,
    NVFP4_TENSOR_FP32,
    NVFP4_TENSOR_POW2,
    SCHEMES,
    scheme_by_name,
)
from tracefp4.formats.tensor import BlockTensor

__all__ = [
    "BF16_LAYER",
    "CONTROL",
    "E2M1",
    "E4M3",
    "E8M0",
    "EMULATED",
    "MXFP4",
    "MXFP4_CEIL",
    "MXFP4_EVEN",
    "MXFP4_FLOOR",
    "MXFP4_RCEIL",
    "NATIVE",
    "NVFP4",
    "NVFP4_KV",
    "NVFP4_ROW_FP32",
    "NVFP4_ROW_POW2",
    "NVFP4_STATIC_POW2",
    "NVFP4_TENSOR_FP32",
    "NVFP4_TENSOR_POW2",
    "SCHEMES",
    "Arithmetic",
    "BlockFormat",
    "BlockTensor",
    "FloatFormat",
    "LayerPrecision",
    "Scheme",
    "calibrate_exponent",
    "round_bf16",
    "round_bf16_",
    "scheme_by_name",
]
