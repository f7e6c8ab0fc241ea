"""Read a recipe strictly: TOML and `--set key=value` into a frozen dataclass, every key and type checked.

An unknown key is an error with the nearest valid name; a wrong type is an error with the path of the value.
The run directory keeps the resolved config as JSON: TOML is for people, JSON for machines.
"""

import difflib
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from tracefp4.errors import ConfigError
from tracefp4.rl.config import RunConfig

_BARE_WORD = re.compile(r"[A-Za-z_~./][A-Za-z0-9_.:/~+\\-]*")
_NAMES = {float: "float", int: "integer", bool: "true or false", str: "string", tuple: "list"}


def load_config(path: Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply `--set` overrides.

    Args:
        path: a TOML file.
        overrides: `key=value` each, dotted keys, TOML values; a bare word counts as a string.

    Raises:
        ConfigError: unreadable TOML, an unknown or missing key, a wrong type, a value out of range.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {path}: cannot be read ({error.strerror}). Check the path.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path}: not valid TOML: {error}.") from error
    return config_from_table(table, overrides=overrides)


def config_from_table(table: dict[str, Any], *, overrides: Sequence[str] = ()) -> RunConfig:
    """Build a RunConfig from nested tables; see `load_config` for the rules."""
    for text in overrides:
        _apply_override(table, text)
    return cast(RunConfig, _build(RunConfig, table, ""))


def _apply_override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: expected key=value, e.g. --set train.lr=1e-5.")
    *parents, last = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {key}: {parent!r} holds a value, not a table.")
    table[last] = _parse_value(key, value.strip())


def _parse_value(key: str, text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if _BARE_WORD.fullmatch(text):
            return text
        raise ConfigError(
            f"--set {key}: {text!r} is not a TOML value. Quote strings: --set '{key}=\"{text}\"'."
        ) from error


def _build(cls: type, table: object, path: str) -> object:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: expected a table, got {table!r}.")
    known = {f.name: f for f in fields(cls)}
    hints = get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {prefix}{near[0]!s}? " if near else ""
            raise ConfigError(f"{prefix}{key}: unknown key. {hint}Valid here: {', '.join(known)}.")
    values: dict[str, object] = {}
    for name, spec in known.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], f"{prefix}{name}")
        elif spec.default is MISSING and spec.default_factory is MISSING:
            if not is_dataclass(hints[name]):
                raise ConfigError(
                    f"{prefix}{name}: required and not given. Add it to the recipe or pass --set."
                )
            values[name] = _build(cast(type, hints[name]), {}, f"{prefix}{name}")
    return cls(**values)


def _convert(kind: Any, value: object, path: str) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _build(cast(type, kind), value, path)
    if origin is Literal:
        if value in arguments:
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{path}: unknown value {value!r}; allowed: {', '.join(map(str, arguments))}.{hint}"
        )
    if origin in (Union, types.UnionType):
        return _convert(next(a for a in arguments if a is not type(None)), value, path)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise ConfigError(f"{path}: expected {len(kinds)} values, got {len(value)}: {value!r}.")
        return tuple(
            _convert(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise ConfigError(f"{path}: expected {_NAMES.get(origin or kind, 'table')}, got {value!r}.")
