"""Hydra's, OmegaConf's and YAML's errors as one sentence: the key, what is allowed, and the cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedValueType,
    ValidationError,
)

from k3train.config.guards import FaultConfig
from k3train.config.keys import closest, default_of, expected, leaf_types, sections
from k3train.config.schema import CorpusConfig, PolicyRule
from k3train.errors import UserError

# What lists hold: the key of one item, whose it is, and a list that works.
_ITEMS = {
    CorpusConfig: (
        "data.train[0]",
        "a corpus of data.train or data.valid",
        "'data.train=[{path: PREFIX, weight: 1.0}]'",
    ),
    FaultConfig: ("faults[0]", "a fault of faults", "'faults=[{kind: kill, step: 5, rank: 0}]'"),
    PolicyRule: ("optim.policy[0]", "a rule of optim.policy", "'optim.policy=[{match: PATTERN, optimizer: adamw}]'"),
}


@contextmanager
def plain_errors(value_of: Callable[[str], Any] = default_of) -> Iterator[None]:
    """Raise a UserError in place of an error of the composition. `value_of` gives a good value of a key."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise explain(error, value_of) from error


def explain(error: Exception, value_of: Callable[[str], Any] = default_of) -> UserError:
    """The sentence for an error of the composition; its deepest OmegaConf cause names the key."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not cause.full_key:
        return UserError(f"the recipe cannot be composed: {' '.join(str(error).split())}")
    key, reason = cause.full_key, str(cause).strip().splitlines()[0].rstrip(".")
    if isinstance(cause, InterpolationKeyError):
        return UserError(f"{key} refers to another key that does not exist ({reason}); correct its ${{...}}")
    if cause.object_type in _ITEMS and not isinstance(cause, MissingMandatoryValue):
        return _item_error(key, cause, reason)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key, None, [])
    if isinstance(cause, MissingMandatoryValue):
        return missing_value(key)
    if isinstance(cause, ValidationError | UnsupportedValueType):
        if key in sections():
            inner = next(name for name in leaf_types() if name.startswith(f"{key}."))
            cure = f"{inner}={as_override(value_of(inner))}"
            return UserError(f"{key} is a group of keys and takes no value of its own; set one of them, as in {cure}")
        value = as_override(value_of(key)) if key in leaf_types() else "VALUE"
        cure = re.sub(r"\[(\d+)\]", r".\1", key) + f"={value}"
        cure = f"'{cure}'" if "{" in cure else cure  # the shell would take it apart
        return UserError(f"{key} has the wrong type ({reason}); allowed: {expected(key)}; try {cure}")
    return UserError(f"the recipe cannot be composed at {key}: {reason}; allowed: {expected(key)}")


def _item_error(key: str, cause: OmegaConfBaseException, reason: str) -> UserError:
    """An item of a list with a wrong key or value."""
    item, whose, cure = _ITEMS[cause.object_type]
    allowed = ", ".join(f"{field.name} ({expected(f'{item}.{field.name}')})" for field in fields(cause.object_type))
    wrong = f"has the wrong type ({reason})" if isinstance(cause, ValidationError) else "is no key"
    return UserError(f"{key} {wrong} of {whose}; allowed: {allowed}; try {cure}")


def missing_value(key: str) -> UserError:
    """A mandatory value (`???`) that nobody gave."""
    settable = re.sub(r"\[(\d+)\]", r".\1", key)
    return UserError(f"{key} has no value (???); allowed: {expected(key)}; try {settable}=VALUE")


def unknown_key(key: str, value: str | None, groups: list[str]) -> UserError:
    """A key that the schema lacks, with the closest one it has. `value` is None where a file gave it."""
    near = closest(key, groups) if "." not in key else None
    near = near or closest(key, leaf_types()) or closest(key, sections())
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if parent in sections() else ""
    siblings = sorted({name[len(prefix) :].split(".")[0] for name in leaf_types() if name.startswith(prefix)})
    where = f"in {parent}" if prefix else "sections"
    found = key if value is None else f"{key}={value}"
    cure = f"try {near}={'VALUE' if value is None else value}" if near else "remove it"
    return UserError(f"{found}: there is no such key; allowed {where}: {', '.join(siblings)}; {cure}")


def as_override(value: Any) -> str:
    """A plain value as Hydra reads it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_override(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_override(item)}" for key, item in value.items()) + "}"
    return str(value)
