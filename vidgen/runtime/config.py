"""Configurations: nested frozen dataclasses, filled from a YAML file and `key.sub=value` overrides.

The dataclass is the schema: its field types are checked by OmegaConf, its ranges by its own `__post_init__`. Every
mistake is one line that names the file, the key, and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from .errors import ConfigError, suggestion

Schema = TypeVar("Schema")

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel carries the configs inside the package; a checkout has them beside it.
CONFIG_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def find_config(name: str | os.PathLike) -> Path:
    """Finds a YAML file by path or by the name it has in the config folders (`"landscape/tiny_vae"`).

    Raises:
        ConfigError: There is no such file; the message lists the nearest names.
    """
    given = Path(name)
    if given.is_file():
        return given
    for folder in CONFIG_FOLDERS:
        for candidate in (folder / given, folder / f"{given}.yaml"):
            if candidate.is_file():
                return candidate
    known = {
        file.relative_to(folder).with_suffix("").as_posix()
        for folder in CONFIG_FOLDERS
        if folder.is_dir()
        for file in folder.rglob("*.yaml")
    }
    raise ConfigError(f"no config {str(name)!r}: it is not a file, and {suggestion(str(name), known)}")


def load_config(
    schema: type[Schema],
    source: str | os.PathLike | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Schema:
    """Builds a dataclass from its defaults, then a YAML file, then overrides; later ones win.

    Args:
        schema: A (frozen) dataclass type; fields may be dataclasses, lists or dictionaries of dataclasses, tuples
            of plain values, or optional ones. A field without default must be given.
        source: Path or name of a YAML file (see `find_config`), a mapping, or `None` for the defaults alone.
        overrides: `"key.sub=value"` strings; values are read as YAML.

    Returns:
        An instance of `schema`.

    Raises:
        ConfigError: The file is missing or malformed, a key is unknown or absent, or a value is not a number (NaN) or
            has the wrong type or range.
    """
    config = OmegaConf.structured(schema)
    where = "defaults"
    if isinstance(source, Mapping):
        where = "given values"
        config = _merge(config, source, schema, where)
    elif source is not None:
        path = find_config(source)
        where = str(path)
        try:
            values = OmegaConf.load(path)
        except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a readable YAML file: {_one_line(error)}") from error
        if not OmegaConf.is_dict(values):
            raise ConfigError(f"{path}: expected `key: value` lines at the top level, found a list")
        config = _merge(config, values, schema, where)
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r}: expected key=value or key.sub=value")
        try:
            value = OmegaConf.from_dotlist([override])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"override {override!r}: {_one_line(error)}") from error
        config = _merge(config, value, schema, f"override {override!r}")
    if overrides:
        where += f" + {len(overrides)} override(s)"
    # Every comparison with NaN is false, so it would slip through most checks of ranges.
    for key, value in _flatten(OmegaConf.to_container(config)).items():
        if _holds_nan(value):
            raise ConfigError(f"{where}: key {key!r} is not a number (NaN)")
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{where}: key {error.full_key!r} has no default and must be given") from error
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from error


def to_yaml(config: Any) -> str:
    """Returns a dataclass instance as YAML text that `load_config` reads back to an equal instance."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def changed_settings(stored: str, given: str) -> dict[str, str]:
    """Compares two configurations as `to_yaml` writes them, key by key.

    Returns:
        Dotted key to `stored -> given`, of the keys whose values differ.

    Raises:
        ConfigError: One of them is not YAML.
    """
    try:
        before, after = (_flatten(OmegaConf.to_container(OmegaConf.create(text))) for text in (stored, given))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"not readable as YAML: {_one_line(error)}") from error
    absent = object()

    def shown(value: Any) -> str:
        return "(absent)" if value is absent else json.dumps(value)

    changed = {}
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, absent), after.get(key, absent)
        if old != new:
            changed[key] = f"{shown(old)} -> {shown(new)}"
    return changed


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; lists are values, and so are empty mappings, whose keys would be lost."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= _flatten(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat


def _holds_nan(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_nan, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, float) and math.isnan(value)


def _merge(config: Any, values: Any, schema: type, where: str) -> Any:
    try:
        return OmegaConf.merge(config, values)
    except OmegaConfBaseException as error:
        key = error.full_key or "(top level)"
        owner = error.object_type
        if isinstance(error, ConfigKeyError):
            fields = [field.name for field in dataclasses.fields(owner if dataclasses.is_dataclass(owner) else schema)]
            raise ConfigError(f"{where}: unknown key {key!r}: {suggestion(str(error.key), fields)}") from error
        raise ConfigError(f"{where}: key {key!r}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """The first line of OmegaConf's messages is the message; a YAML error needs its position lines too."""
    if isinstance(error, OmegaConfBaseException):
        return str(error).split("\n")[0]
    return re.sub(r"\s+", " ", str(error)).strip()
