"""Quantize a tensor to NVFP4, look at its bytes, and see how one recorded bit repairs a rounding that flipped."""

import torch

from tracefp4 import NVFP4_ROW_POW2, dequantize, quantize
from tracefp4.ops.guided_quantize import Guide, guided_quantize


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64).bfloat16().float()

    # Two codes a byte, one E4M3 scale per 16 values, one power of two per row.
    packed = quantize(x, scheme=NVFP4_ROW_POW2)
    values = dequantize(packed)
    print(f"{x.numel()} values in {packed.num_bytes} bytes; bf16 would take {2 * x.numel()}")
    print(f"codes of the first block:  {packed.codes()[0, :16].tolist()}")
    print(f"scale bytes of row 0:      {[hex(b) for b in packed.block_scales[0].tolist()]}")
    print(f"outer exponent of row 0:   2^{packed.outer[0].item()}")
    print(f"relative error:            {((values - x).norm() / x.norm()).item():.3f}")
    print(f"exact in bf16:             {torch.equal(values, values.bfloat16().float())}")

    # Rollout and trainer compute nearly the same numbers. Near a rounding boundary "nearly" is not enough:
    # 60.24 and 59.76 stand on two sides of 2.5 * 24 and round to 72 and 48.
    rollout_x = torch.full((1, 16), 144.0)
    rollout_x[0, 3] = 60.24
    trainer_x = rollout_x.clone()
    trainer_x[0, 3] = 59.76
    rollout = guided_quantize(rollout_x, scheme=NVFP4_ROW_POW2)
    nearest = guided_quantize(trainer_x, scheme=NVFP4_ROW_POW2)
    print(f"\nrollout rounds 60.24 to    {rollout.values[0, 3].item():g}")
    print(f"trainer rounds 59.76 to    {nearest.values[0, 3].item():g}")

    # The rollout keeps its scales and the lowest bit of every code; the trainer follows.
    assert rollout.codes is not None
    guide = Guide(
        valid=torch.tensor([True]),
        outer=rollout.outer,
        block_scales=rollout.block_scales,
        codes=None,
        bits=rollout.codes & 1,
        decoder="nearest_cell",
    )
    guided = guided_quantize(trainer_x, scheme=NVFP4_ROW_POW2, guide=guide)
    print(f"with the recorded bit:     {guided.values[0, 3].item():g}")
    assert torch.equal(guided.values, rollout.values)
    print(f"values that guidance moved: {int(guided.nearest_changed)} of {guided.values.numel()}")


if __name__ == "__main__":
    main()
