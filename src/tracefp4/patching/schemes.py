"""Which scheme may serve which part of the model, and the reason where it may not.

    activations   row, static and MXFP4 schemes: a row's bytes never depend on another row of the batch
    weights       tensor and MXFP4 schemes: a matrix is quantized whole, once per version
    K and V       a static power of two: pages written by different steps are read under one scale

An outer scale in float32 makes operands that bf16 cannot hold: they are computed with as they are, and an arithmetic
that stores bf16 refuses them (`LayerPrecision.check_storage`). Guided sites need an outer scale that a record can hold:
a power of two per row, one static power of two, or none. This module decides nothing about modules (`rules`) and
quantizes nothing.
"""

from tracefp4.coding import codec_by_name
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import Scheme, scheme_by_name
from tracefp4.ops.guided_quantize import check_decodable

ALLOWED_OUTER = {"activation": ("row", "static", "none"), "weight": ("tensor", "none"), "kv": ("static",)}
"""Where the outer scale of each option's scheme may live."""
_REASONS = {
    (
        "activation",
        "tensor",
    ): "it is taken over the whole batch, so a token's bytes would depend on its neighbours",
    ("weight", "row"): "checkpoints and kernels store one per matrix",
    ("weight", "static"): "weights are there to be measured",
    ("kv", "row"): "a page would need one per token",
    ("kv", "tensor"): "it would change with every token that is appended",
    ("kv", "none"): "the cache has no MXFP4 pages",
}


def part_scheme(option: str, name: str) -> Scheme | None:
    """Return the scheme that an option names, if it can serve there.

    Args:
        option: `activation`, `weight` or `kv`.
        name: Name of a scheme, or `none`.

    Returns:
        The scheme; None for `none`, which keeps the part in bf16.

    Raises:
        ConfigError: an unknown name, or a scheme whose outer scale does not fit the part.
    """
    if name == "none":
        return None
    try:
        scheme = scheme_by_name(name)
    except ConfigError as error:
        raise ConfigError(f"quantization.{option}: {error}") from error
    allowed = ALLOWED_OUTER[option]
    if scheme.outer not in allowed:
        raise ConfigError(
            f"quantization.{option}: {name} has its outer scale per {scheme.outer!r}, and "
            f"{_REASONS[option, scheme.outer]}; {option} needs one per {' or '.join(map(repr, allowed))}. Choose a "
            "scheme of that kind, or keep the default."
        )
    if option == "kv" and scheme.outer_kind != "exponent":
        raise ConfigError(
            f"quantization.kv: {name} stores its outer scale as a float32 {scheme.outer_kind}; pages have an int8 "
            'power of two. Use NVFP4_KV, or keep the cache in bf16 (kv = "none").'
        )
    return scheme


def check_recordable(site: str, scheme: Scheme) -> None:
    """Refuse guidance at a site whose outer scale is a float32 number.

    Args:
        site: Name of the site or site kind, for the message.
        scheme: Its scheme.

    Raises:
        ConfigError: the outer scale is no power of two.
    """
    if not scheme.is_exact_in_bf16:
        raise ConfigError(
            f"plan: site {site} cannot be guided under {scheme.name}: records hold powers of two as outer scales, its "
            f"outer scale is a float32 {scheme.outer_kind}. Guide under a POW2 or MXFP4 scheme, leave this kind out of "
            'quantization.sites, or say guidance = "none".'
        )


def check_codec(site: str, scheme: Scheme, codec: str) -> None:
    """Refuse a codec whose scales no reader could decode under a site's scheme.

    Args:
        site: Name of the site, for the message.
        scheme: Its scheme.
        codec: Name of a codec.

    Raises:
        ConfigError: low bits of scales under "four over six", or syndromes of E8M0 scales.
    """
    try:
        check_decodable(codec_by_name(codec).scale_coding, scheme)
    except FormatError as problem:
        raise ConfigError(f"plan: site {site} cannot be followed with codec {codec!r}: {problem}") from None


def can_follow(scheme: Scheme, codec: str) -> bool:
    """Return whether `check_codec` lets a codec pass."""
    try:
        check_codec("", scheme, codec)
    except ConfigError:
        return False
    return True
