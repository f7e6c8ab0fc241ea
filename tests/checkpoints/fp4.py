"""Tiny models whose widths fit both block sizes, quantized, and statistics for them."""

from pathlib import Path

import torch
from tests.checkpoints.tiny_families import save_tiny

from tracefp4.checkpoints import (
    Checkpoint,
    LayerStatistics,
    Output,
    Settings,
    Statistics,
    model_digest,
    quantize_checkpoint,
)
from tracefp4.formats import SCHEMES

NUM_EXPERTS = 4
WIDTH = 32


def save_wide(family: str, directory: Path, **options):
    """A tiny model of which every matrix is a multiple of 32 wide."""
    widths = {"intermediate_size": WIDTH}
    if family not in ("mixtral", "gpt_oss", "olmoe"):
        widths["moe_intermediate_size"] = WIDTH
    return save_tiny(family, directory, **{**widths, **options})


def quantized(source: Path, out: Path, *, scheme: str = "NVFP4_TENSOR_POW2", statistics=None, **settings):
    """Quantize and return the summary."""
    made = Settings(scheme=SCHEMES[scheme], **settings)
    return quantize_checkpoint(source, Output(path=out), made, statistics=statistics)


def statistics_of(checkpoint: Path, *, layers: int = 2) -> Statistics:
    """Statistics as a calibration might find them: x at most 20 and 3 in layers 0 and 1, w2 at most 5."""
    with Checkpoint(checkpoint) as opened:
        config = opened.config
    return Statistics(
        model=model_digest(config),
        source="0" * 16,
        num_tokens=1000,
        layers={
            layer: LayerStatistics(
                tokens=torch.full((NUM_EXPERTS,), 500),
                x_square=torch.rand(NUM_EXPERTS, WIDTH),
                x_square_all=torch.rand(WIDTH),
                w2_square=torch.rand(NUM_EXPERTS, WIDTH),
                amax=torch.tensor([(20.0, 3.0)[layer % 2], 5.0]),
            )
            for layer in range(layers)
        },
    )


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor."""
    with Checkpoint(directory) as opened:
        return {name: opened.read(name) for name in opened.specs}


def files(directory: Path) -> dict[str, bytes]:
    """Every file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the weights of a checkpoint in place, as another program might."""
    from safetensors.torch import save_file

    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
