"""Which scheme each part of one layer uses: one small value that engine and trainer share.

It names schemes and static exponents; it does not select modules (that is the plan's work) and holds no
tensors.
"""

from dataclasses import dataclass

from tracefp4.errors import ConfigError
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT, Scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPrecision:
    """Schemes of one layer; None means that the part stays bf16."""

    activation: Scheme | None
    """Scheme of the routed experts' inputs and of the down-projection inputs; None = bf16."""
    weight: Scheme | None
    """Scheme of the routed experts' weights; None = bf16."""
    kv: Scheme | None
    """Scheme of the keys (after RoPE) and values in the cache; None = bf16."""
    k_exponent: int = 0
    """Static outer exponent of the keys, in [-110, 116]; read only when `kv` is a static scheme."""
    v_exponent: int = 0
    """Static outer exponent of the values, in [-110, 116]; read only when `kv` is a static scheme."""

    def __post_init__(self) -> None:
        """Refuse exponents outside the range of the schemes."""
        for name in ("k_exponent", "v_exponent"):
            value = getattr(self, name)
            if not MIN_EXPONENT <= value <= MAX_EXPONENT:
                raise ConfigError(
                    f"{name} must lie in [{MIN_EXPONENT}, {MAX_EXPONENT}]; got {value}. "
                    "Calibrate it again on a batch."
                )


BF16_LAYER = LayerPrecision(activation=None, weight=None, kv=None)
"""A layer in which nothing is quantized."""
