"""What one line of `bench guidance` means, which codecs it tries, and what each would store for a large model.

Bytes are counted, not measured: what a codec keeps of codes and scales, per token, at the widths of Qwen3.5-35B-A3B
(activations of its 40 layers; K and V of its 10 attention layers) and of the measured model. Row exponents and routed
ids are not the codec's and are not in them. This module runs no model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from tracefp4.coding import CODECS, Codec, codec_by_name
from tracefp4.guidance import Site
from tracefp4.patching.catalogue import KNOWN_SHAPES

LARGE_MODEL = KNOWN_SHAPES["qwen3.5-35b-a3b"]
LARGE_WIDTHS = {"x": LARGE_MODEL.hidden, "k": LARGE_MODEL.kv_width, "v": LARGE_MODEL.kv_width}
"""Values per row by kind of site."""
BLOCK_SIZE = 16
AIM_BYTES, AMBITION_BYTES = 2500, 1600
"""Activation bytes per token of the large model, all layers, at or below the BF16 floor."""
SWEEP = tuple(
    code + scales
    for code in (
        "secded", "bch64_2", "bch64_3", "bch64_4", "bch128_2", "bch128_3", "bch128_4", "bch256_2", "bch256_3",
        "bch256_4", "bch512_3", "bch512_4",
    )
    for scales in ("", "+coset1", "+bch128_2")
)  # fmt: skip
"""Codes of every length for the codes, with two bits, one bit or a code for the scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One way to follow the rollout: a codec and the layers that it guides."""

    codec: str
    """Name of the codec; `auto` for a choice per site."""
    layers: str
    """`all` or `last_half`."""

    @property
    def id(self) -> str:
        """Stable name of the row."""
        return self.codec if self.layers == "all" else f"{self.codec}.{self.layers}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceRow:
    """How far one trainer's log-probs are from one rollout's, on the rollout's tokens, and what it costs."""

    id: str
    """Stable name, e.g. `bf16`, `nearest`, `secded`, `mantissa.last_half`."""
    rollout: str
    """`BF16` or `FP4`."""
    trainer: str
    """How the trainer computes."""
    layers: str
    """Layers that are guided: `all`, `last_half`, or `-` without guidance."""
    mean: float
    """Mean of |log p_train - log p_rollout| over the sampled tokens, nats."""
    p99: float
    """Its 99th percentile."""
    largest: float
    """Its maximum."""
    k3: float
    """Mean of e^d - 1 - d, d = log p_train - log p_rollout: an estimate of KL(rollout || trainer)."""
    residual: float | None = None
    """Share of values at recorded sites whose code still differs from the rollout's; None where nothing is compared."""
    local: float | None = None
    """The same before the site's own guidance, in the guided pass: what a decoder has to correct."""
    undecoded: int | None = None
    """Blocks of syndromes for which no plausible set of flips was found; None without syndromes."""
    activation_bytes: int = 0
    """Codec bytes per token of the large model's activations."""
    kv_bytes: int = 0
    """Codec bytes per token of its K and V."""
    own_bytes: int = 0
    """Codec bytes per token of the measured model, all guided sites."""
    is_shortened: bool = False
    """True when the measured model's rows are shorter than a code of this codec, which then corrects more than it would
    on the large model's rows: mean and residual do not carry over."""
    encode_rate: float | None = None
    """Million values encoded per second."""
    decode_rate: float | None = None
    """Million values rounded under this guide per second, scales and codes decoded."""
    within_floor: bool | None = None
    """True when `mean` is at or below the BF16 floor; None for the floor itself."""

    def to_json(self) -> dict[str, object]:
        """Return every field."""
        return asdict(self)


def tried(*, sweep: bool = True) -> list[Tried]:
    """Return what the suite tries: every codec of CODECS for all and for the last half of the layers, and the sweep."""
    found = [Tried(codec=name, layers=layers) for name in CODECS for layers in ("all", "last_half")]
    more = [Tried(codec=name, layers="all") for name in SWEEP if name not in CODECS]
    return [*found, *more] if sweep else found


def large_bytes(codecs: Iterable[str], *, layers: str = "all") -> tuple[int, int]:
    """Return (activation bytes, KV bytes) per token of the large model.

    Args:
        codecs: one codec, or several that stand for equal shares of the layers (a choice per layer of a smaller model).
        layers: `all` or `last_half`.
    """
    names, depth = list(codecs), LARGE_MODEL.layers
    guided = range(depth) if layers == "all" else range(depth // 2, depth)
    cached = [layer for layer in LARGE_MODEL.attention_layers if layer in guided]
    per_layer = {kind: sum(_row_bytes(name, width) for name in names) for kind, width in LARGE_WIDTHS.items()}
    x, kv = per_layer["x"] * len(guided), (per_layer["k"] + per_layer["v"]) * len(cached)
    return round(x / len(names)), round(kv / len(names))


def own_bytes(codecs: Mapping[Site, str], *, widths: Mapping[str, int]) -> int:
    """Return the codec bytes per token of chosen codecs.

    Args:
        codecs: codec of every guided site.
        widths: values per row by kind of site, `x`, `k` and `v`.
    """
    return sum(_row_bytes(name, widths[site.kind]) for site, name in codecs.items())


def is_shortened(codecs: Mapping[Site, str], *, widths: Mapping[str, int]) -> bool:
    """Return whether some code is longer than a row that it is used on, while the large model's row is longer."""
    return any(
        _is_cut(codec_by_name(name), widths[site.kind], LARGE_WIDTHS[site.kind])
        for site, name in codecs.items()
    )


def _is_cut(codec: Codec, width: int, large_width: int) -> bool:
    pairs = ((codec.code, 1), (codec.scale_code, BLOCK_SIZE))
    return any(
        code is not None and width // size < min(code.length, large_width // size) for code, size in pairs
    )


def _row_bytes(name: str, width: int) -> int:
    return codec_by_name(name).row_bytes(width, block_size=BLOCK_SIZE)
