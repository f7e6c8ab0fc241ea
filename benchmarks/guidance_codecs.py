"""How far a trainer's quantized tensor lies from the rollout's, by noise and by what a codec keeps.

Gaussian values in rows of 2,048 under NVFP4_ROW_POW2; the trainer's are the rollout's plus noise * std, both rounded
to bf16. Printed for each codec and noise: the relative Frobenius distance between the two quantized tensors, the
share of codes and of scale bytes that differ after decoding, and the share of blocks of syndromes that nothing
explained.
"""

import argparse
import platform

import torch
from torch import Tensor

from tracefp4 import NVFP4_ROW_POW2
from tracefp4.coding import Codec, Payload, ScaleCoding, codec_by_name
from tracefp4.ops.guided_quantize import Guide, Rounded, guided_quantize
from tracefp4.ops.syndromes import encode_syndromes

NOISES = (0.001, 0.002, 0.003, 0.01, 0.03, 0.1)
ROWS, WIDTH = 100, 2048
CODECS = (
    "full",
    "low2",
    "mantissa",
    "mantissa_lean",
    "mantissa+coset1",
    "parity4",
    "secded+raw",
    "secded",
    "bch64_3",
    "bch128_3",
    "bch128_3+coset1",
    "bch128_4",
    "bch256_3+bch128_2",
    "bch256_4+bch128_2",
    "bch512_6+bch128_2",
)
_LOW_BITS = {ScaleCoding.RAW: 0xFF, ScaleCoding.COSET2: 3, ScaleCoding.COSET1: 1}


def guide_of(rollout: Rounded, codec: Codec, *, decoder: str, band: float | None) -> Guide:
    """Build the guide that a codec would give."""
    codes = rollout.codes
    assert codes is not None
    if codec.scale_code is not None:
        scales = encode_syndromes(rollout.block_scales, code=codec.scale_code)
    else:
        scales = rollout.block_scales & _LOW_BITS[codec.scale_coding]
    is_two = codec.payload is Payload.LOW2
    return Guide(
        valid=torch.ones(len(codes), dtype=torch.bool),
        outer=rollout.outer,
        block_scales=scales,
        scale_coding=codec.scale_coding,
        scale_code=codec.scale_code,
        codes=codes if codec.payload is Payload.FULL else None,
        bits=codes & (3 if is_two else 1) if is_two or codec.payload is Payload.MANTISSA else None,
        num_bits=2 if is_two else 1,
        syndromes=None if codec.code is None else encode_syndromes(codes, code=codec.code),
        code=codec.code,
        decoder=decoder,  # type: ignore[arg-type]
        band=band,
    )


def line(name: str, rate: str, rollout: Rounded, got: Rounded, num_syndromes: int) -> str:
    """Return the figures of one rounding."""
    assert got.codes is not None and rollout.codes is not None
    distance = ((got.values - rollout.values).norm() / rollout.values.norm()).item()
    both = got.codes | rollout.codes
    codes = ((got.codes != rollout.codes) & (both & 7 != 0)).float().mean().item()
    scales = (got.block_scales != rollout.block_scales).float().mean().item()
    lost = int(got.undecoded) / num_syndromes if num_syndromes and got.undecoded is not None else 0.0
    return f"{name:28}{rate:>7}{distance:10.4f}{codes:10.3%}{scales:10.3%}{lost:12.2%}"


def num_syndromes_of(codec: Codec, x: Tensor) -> int:
    """Return how many syndromes a tensor's guide holds."""
    rows, width = x.shape
    num_values = 0 if codec.code is None else codec.code.num_blocks(width)
    num_scales = 0 if codec.scale_code is None else codec.scale_code.num_blocks(width // 16)
    return rows * (num_values + num_scales)


def main() -> None:
    """Print one table per noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--band", type=float, help="the noise gate, in decode scales; none by default")
    band = parser.parse_args().band
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, {ROWS * WIDTH:,} values, band {band}")
    x = torch.randn(ROWS, WIDTH).bfloat16().float()
    rollout = guided_quantize(x, scheme=NVFP4_ROW_POW2)
    for noise in NOISES:
        trainer_x = (x + noise * torch.randn(x.shape)).bfloat16().float()
        print(f"\nnoise {noise:.1%}")
        print(f"{'codec':28}{'bits':>7}{'distance':>10}{'codes':>10}{'scales':>10}{'unexplained':>12}")
        print(line("nearest", "0", rollout, guided_quantize(trainer_x, scheme=NVFP4_ROW_POW2), 0))
        for name in CODECS:
            codec = codec_by_name(name)
            for decoder in (
                ("bracket", "nearest_cell") if codec.payload is Payload.MANTISSA else ("nearest_cell",)
            ):
                guide = guide_of(rollout, codec, decoder=decoder, band=band)
                got = guided_quantize(trainer_x, scheme=NVFP4_ROW_POW2, guide=guide)
                label = f"{name}, bracket" if decoder == "bracket" else name
                rate = f"{codec.bits_per_value():.3f}"
                print(line(label, rate, rollout, got, num_syndromes_of(codec, x)))


if __name__ == "__main__":
    main()
