"""Which scheme each part of one layer uses: one small value that engine and trainer share.

It names schemes and static exponents, by part: x (the routed experts' input), w2 (the down-projection's input),
k and v (what the cache holds). It does not select modules (that is the plan's work) and holds no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import Arithmetic
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, Scheme

Part = Literal["x", "w2", "k", "v"]
"""A tensor of a layer that is rounded in every pass."""
PARTS: tuple[Part, ...] = ("x", "w2", "k", "v")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPrecision:
    """Schemes of one layer; None means that the part stays bf16."""

    activation: Scheme | None
    """Scheme of the routed experts' inputs and of the down-projection inputs; None = bf16."""
    weight: Scheme | None
    """Scheme of the routed experts' weights; None = bf16."""
    kv: Scheme | None
    """Scheme of the keys (after RoPE) and values in the cache; None = bf16."""
    x_exponent: int = 0
    """Static outer exponent of the experts' inputs, in [-110, 116]; read only when `activation` is static."""
    w2_exponent: int = 0
    """Static outer exponent of the down-projection's inputs; range and use as `x_exponent`."""
    k_exponent: int = 0
    """Static outer exponent of the keys, in [-110, 116]; read only when `kv` is a static scheme."""
    v_exponent: int = 0
    """Static outer exponent of the values, in [-110, 116]; read only when `kv` is a static scheme."""

    def __post_init__(self) -> None:
        """Refuse exponents outside the range of the schemes."""
        for part in PARTS:
            name = f"{part}_exponent"
            value = getattr(self, name)
            if not MIN_EXPONENT <= value <= MAX_EXPONENT:
                raise ConfigError(
                    f"{name} must lie in [{MIN_EXPONENT}, {MAX_EXPONENT}]; got {value}. "
                    "Calibrate it again on a batch."
                )

    def scheme_of(self, part: Part) -> Scheme | None:
        """Return the scheme of a part, None where it stays bf16."""
        return self.kv if part in ("k", "v") else self.activation

    def exponent_of(self, part: Part) -> int | None:
        """Return the static exponent of a part as the ops take it: None unless its scheme is static."""
        scheme = self.scheme_of(part)
        if scheme is None or scheme.outer != "static":
            return None
        return int(getattr(self, f"{part}_exponent"))

    def check_storage(self, arithmetic: Arithmetic) -> None:
        """Refuse operands that the arithmetic's storage would round a second time.

        Raises:
            ConfigError: bf16 storage and an activation or weight scheme with a float32 outer scale.
        """
        for scheme in (self.activation, self.weight):
            if scheme is not None and arithmetic.dtype == "bfloat16" and not scheme.is_exact_in_bf16:
                raise ConfigError(
                    f"Arithmetic {arithmetic.name} stores bf16, which cannot hold the values of {scheme.name}: its "
                    "outer scale is float32. Allowed are schemes with a power of two or none (POW2, MXFP4). Choose "
                    "one of them, or an arithmetic that stores float32."
                )


BF16_LAYER = LayerPrecision(activation=None, weight=None, kv=None)
"""A layer in which nothing is quantized."""


def scheme_digest(layers: Sequence[LayerPrecision]) -> str:
    """Return the digest of all schemes in force: what records, plans and manifests are compared by.

    Args:
        layers: one per decoder layer; exponents are not looked at.

    Returns:
        `activation-weight-kv`, the digests of a layer's schemes with `bf16` for None. Layers that differ (experts or
        cache kept bf16 in some) join with `+`, each combination once, in the order of first appearance. Layers
        without any scheme count only where there are no others.
    """
    rounded = [layer for layer in layers if layer.activation or layer.weight or layer.kv] or [BF16_LAYER]
    found = (
        "-".join("bf16" if scheme is None else scheme.digest for scheme in (s.activation, s.weight, s.kv))
        for s in rounded
    )
    return "+".join(dict.fromkeys(found))
