"""tracefp4.json: what config.json has no place for, beside it in every checkpoint that this room writes.

Scheme names with their digests, method, calibration, the error of every module, and how the run that trained the
weights rounded K and V. In a plain checkpoint it also marks that the weights are values of an FP4 checkpoint, and
holds what the values and the sidecar do not say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.checkpoints.layouts import Precision
from tracefp4.errors import ConfigError, FormatError
from tracefp4.formats import SCHEMES, Scheme
from tracefp4.formats.scheme import MAX_EXPONENT, MIN_EXPONENT
from tracefp4.version import VERSION

METADATA_FILE = "tracefp4.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticScales:
    """Two tensors of every layer that are rounded under static powers of two: inputs (x, w2), or the cache (k, v)."""

    scheme: Scheme | None
    """Their static scheme; None when they stayed in bf16 in every layer."""
    exponents: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Layer -> outer exponents of the two, in [-110, 116]; a layer that is not there stayed in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """Content of tracefp4.json."""

    layout: str
    """Name of the layout; `plain` for values with a sidecar."""
    precision: Precision
    """The schemes; stored with their digests."""
    method: str
    """How block scales were found: `nearest`, `4over6`, `h-scale`, `carried` (by another program)."""
    calibration: str | None = None
    """Digest of the statistics that were used."""
    cache: StaticScales | None = None
    """How the run that trained the weights rounded K and V; None where no run says so."""
    modules: dict[str, dict[str, float | int | None]] = field(default_factory=dict)
    """Every quantized module, with its error where it was measured."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Of a plain checkpoint: the `layout` that it came from, outer scales of `inputs` by module and their
    `input_kind`, `dtype` of its config."""
    tool: str = VERSION
    """Version that quantized."""

    def to_bytes(self) -> bytes:
        """The file."""
        content: dict[str, Any] = {
            "version": _VERSION,
            "tool": f"tracefp4 {self.tool}",
            "layout": self.layout,
            "weight": _named(self.precision.weight),
            "activation": _named(self.precision.activation),
            "method": self.method,
            "calibration": self.calibration,
        }
        if self.cache is not None:
            exponents = {str(layer): list(pair) for layer, pair in sorted(self.cache.exponents.items())}
            content["cache"] = {"scheme": _named(self.cache.scheme), "exponents": exponents}
        if self.origin:
            content["origin"] = self.origin
        return (json.dumps({**content, "modules": self.modules}, indent=1) + "\n").encode()


def read_metadata(directory: Path) -> Metadata | None:
    """Return the content of a directory's tracefp4.json, None without one.

    Raises:
        ConfigError: another version, or an unknown scheme.
        FormatError: not readable, or a scheme that has other rules here than where the file was written.
    """
    path = directory / METADATA_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        version = content["version"]
        if version != _VERSION:
            raise ConfigError(
                f"{path} has version {version!r}. Version {_VERSION} is read here. Use the tracefp4 that wrote it."
            )
        weight, activation = _scheme(path, content["weight"]), _scheme(path, content["activation"])
        if weight is None:
            raise ValueError("it names no weight scheme")
        return Metadata(
            layout=str(content["layout"]),
            precision=Precision(weight=weight, activation=activation),
            method=str(content["method"]),
            calibration=content["calibration"],
            cache=_cache(path, content.get("cache")),
            modules=dict(content["modules"]),
            origin=dict(content.get("origin", {})),
            tool=str(content["tool"]).removeprefix("tracefp4 "),
        )
    except (ConfigError, FormatError):
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It is written with every checkpoint. Copy the "
            "checkpoint again."
        ) from error


def _named(scheme: Scheme | None) -> dict[str, str] | None:
    return None if scheme is None else {"scheme": scheme.name, "digest": scheme.digest}


def _cache(path: Path, found: dict[str, Any] | None) -> StaticScales | None:
    if found is None:
        return None
    scheme = _scheme(path, found["scheme"])
    exponents = {int(layer): (int(k), int(v)) for layer, (k, v) in found["exponents"].items()}
    if (scheme is None) != (not exponents) or (scheme is not None and scheme.outer != "static"):
        raise ValueError("the cache needs a static scheme with exponents, or neither")
    if not all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for pair in exponents.values() for exponent in pair):
        raise ValueError(f"exponents of the cache lie in [{MIN_EXPONENT}, {MAX_EXPONENT}]")
    return StaticScales(scheme=scheme, exponents=exponents)


def _scheme(path: Path, found: dict[str, str] | None) -> Scheme | None:
    if found is None:
        return None
    scheme = SCHEMES.get(found["scheme"])
    if scheme is None or scheme.digest != found["digest"]:
        here = "no such scheme" if scheme is None else f"digest {scheme.digest}"
        raise FormatError(
            f"{path}: the scheme {found['scheme']} has digest {found['digest']}; here it is {here}. The same name must "
            "mean the same rules. Read the checkpoint with the tracefp4 that wrote it."
        )
    return scheme
