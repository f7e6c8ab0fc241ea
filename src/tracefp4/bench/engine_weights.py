"""Random weights of a whole model, made tensor by tensor on the device when an engine asks for them.

Every tensor depends on its name and the seed alone, so asking twice gives the same values and nothing is kept: what is
in memory is the engine's copy and one tensor. Experts that a plan quantizes are random valid bytes from the start. The
scales keep activations at about unit size in every layer: matrices have variance 1 / (columns), norms multiply by one.

Routing follows from the weights. "uniform": router logits are independent normal numbers. "zipf": one column of the
embedding is the same for all tokens and survives in the residual stream, and every router has -ln(rank) on it, with
noise of the width of Gumbel's, so that experts are chosen about in proportion to 1 / rank; ranks are drawn in every
layer. How many experts are in use is measured, never assumed.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tracefp4.bench.routing import Skew
from tracefp4.errors import ConfigError
from tracefp4.formats.precision import LayerPrecision
from tracefp4.formats.scheme import Scheme
from tracefp4.formats.tensor import BlockTensor
from tracefp4.models.qwen3_moe_config import Qwen3MoeSizes

CODES_RMS = 2.93
"""Root mean square of the sixteen E2M1 values."""
SCALE_BYTES = (0x34, 0x3D)
"""E4M3 bytes of block scales, first and one past the last: 0.75 to 1.5."""
GUMBEL_STD = math.pi / math.sqrt(6)
COMMON_SHARE = 0.5
"""Value of the common column of the embedding, in square roots of the width; the others have variance 1."""


class RandomState(Mapping[str, Tensor | BlockTensor]):
    """A state dict whose tensors are made when they are asked for.

    Args:
        sizes: Gives names and shapes.
        precision: One entry per layer; experts under a weight scheme are bytes of it, the rest is bf16.
        device: Where tensors are made.
        routing: How tokens choose experts.
        seed: Of everything.

    Raises:
        ConfigError: A weight scheme other than NVFP4 with one power of two per matrix.
    """

    def __init__(
        self,
        sizes: Qwen3MoeSizes,
        precision: Sequence[LayerPrecision],
        *,
        device: torch.device,
        routing: Skew = "uniform",
        seed: int = 0,
    ) -> None:
        self._shapes = sizes.shapes()
        self._is_hybrid = bool(sizes.state_layers)
        self._schemes = [layer.weight for layer in precision]
        self._device = device
        self._routing = routing
        self._seed = seed
        for scheme in self._schemes:
            _check_scheme(scheme)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __getitem__(self, name: str) -> Tensor | BlockTensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if len(shape) == 1:
            # Qwen3.5 multiplies by 1 + w in its norms, but for that of a gated delta layer
            is_centered = self._is_hybrid and name.endswith("norm.weight") and ".linear_attn." not in name
            value = 0.0 if is_centered or name.endswith(("A_log", "dt_bias")) else 1.0
            return torch.full(shape, value, dtype=torch.bfloat16, device=self._device)
        scheme = self._schemes[int(name.split(".")[2])] if ".experts." in name else None
        if scheme is not None:
            return _random_bytes(shape, scheme, generator)
        made = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=self._device)
        if name == "model.embed_tokens.weight":
            return self._with_common_column(made)
        made *= shape[-1] ** -0.5
        return self._with_ranks(made, generator) if name.endswith("mlp.gate.weight") else made

    def _with_common_column(self, embedding: Tensor) -> Tensor:
        if self._routing == "zipf":
            embedding[:, 0] = COMMON_SHARE * math.sqrt(embedding.shape[1])
        return embedding

    def _with_ranks(self, router: Tensor, generator: torch.Generator) -> Tensor:
        if self._routing == "zipf":
            experts, width = router.shape
            # what a norm leaves of the common column
            common = COMMON_SHARE * math.sqrt(width / (1 + COMMON_SHARE**2))
            ranks = torch.randperm(experts, generator=generator, device=self._device) + 1
            router *= GUMBEL_STD
            router[:, 0] = -ranks.float().log() / common
        return router


def _random_bytes(shape: Sequence[int], scheme: Scheme, generator: torch.Generator) -> BlockTensor:
    experts, rows, width = shape
    device = generator.device
    low, high = SCALE_BYTES
    exponent = round(math.log2(width**-0.5 / CODES_RMS))
    scale_shape = (experts, rows, width // scheme.block_size)
    # eight bytes a draw
    words = torch.empty((experts, rows, width // 16), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    return BlockTensor(
        packed=words.view(torch.uint8),
        block_scales=torch.randint(
            low, high, scale_shape, generator=generator, dtype=torch.uint8, device=device
        ),
        outer=torch.full((experts,), exponent, dtype=torch.int8, device=device),
        scheme=scheme,
    )


def _check_scheme(scheme: Scheme | None) -> None:
    if scheme is not None and (
        scheme.block_size != 16 or scheme.outer != "tensor" or not scheme.is_exact_in_bf16
    ):
        raise ConfigError(
            f"bench engine: random bytes of experts cannot be made under {scheme.name}; allowed are NVFP4 schemes with "
            "one power of two per matrix. Use NVFP4_TENSOR_POW2."
        )
