"""Checks of the overrides before Hydra composes: unknown keys, groups and options, stray sweeps."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable

from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from k3train.config.explain import as_override, unknown_key
from k3train.config.keys import closest, is_known, sections
from k3train.errors import UserError


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Hydra's parse of the command line. Raises UserError for what is not `key=value`."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        if text.startswith("-"):
            raise UserError(f"unknown option {text}; `k3train --help` lists the options")
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException as error:
            raise UserError(
                f"cannot read the override {text!r}; write key=value, and quote a value that holds any of"
                " ()[]{},=: for Hydra and the shell, as in \"parallel.pipeline_layout='E(t|)*8tL'\""
            ) from error
    return parsed


def group_options(hydra: Hydra, group: str) -> list[str]:
    """The options of a config group, nested ones as `pretrain/k3-tiny`."""
    loader = hydra.config_loader
    options = list(loader.get_group_options(group))
    for inner in loader.get_group_options(group, ObjectType.GROUP):
        options += [f"{inner}/{option}" for option in group_options(hydra, f"{group}/{inner}")]
    return sorted(options)


def check_overrides(overrides: list[str], hydra: Hydra, multirun: bool = False) -> None:
    """Refuse, in words, unknown keys, groups and options, deletions, and sweeps outside --multirun."""
    groups = [g for g in hydra.config_loader.get_group_options("", ObjectType.GROUP) if g != "cluster"]  # the planner's
    parsed = [override for override in parse_overrides(overrides) if not override.is_hydra_override()]
    for override in parsed:
        key, text = override.key_or_group, override.input_line
        if override.is_delete():
            raise UserError(
                f"{text} would delete a key, and every key of a recipe has a value; set {key}=VALUE instead"
            )
        if override.is_sweep_override() and not multirun:
            raise UserError(
                f"{text} names several values; one is allowed in a single run; add --multirun to run each, or"
                f" write {key}=[...] for a list"
            )
        if key in groups:
            _check_option(override, group_options(hydra, key))
        elif not is_known(key):
            raise unknown_key(key, text.partition("=")[2], groups)
    if not any(override.key_or_group == "recipe" for override in parsed):
        names = group_options(hydra, "recipe")
        raise UserError(f"recipe is not chosen; allowed: {', '.join(names)}; try recipe={_nearest('k3-tiny', names)}")


def _check_option(override: Override, options: list[str]) -> None:
    group = override.key_or_group
    if override.is_discrete_sweep():
        values = list(override.sweep_string_iterator())
    else:
        values = [override.value()]
    for value in values:
        if isinstance(value, dict) and group in sections():
            continue  # optim={lr: 1e-3} sets keys, it does not choose an option
        if value not in options:
            raise UserError(
                f"{group}={as_override(value)} does not exist; allowed: {', '.join(options)};"
                f" try {group}={_nearest(str(value), options)}"
            )


def _nearest(value: str, options: list[str]) -> str:
    """The most similar option; failing that, the one whose last part is (`k3-tiny`, `sft/k3-tiny`).

    A recipe named without its folder is meant to pretrain: the other stages start from what that leaves.
    """
    if "/" not in value and any(option.startswith("pretrain/") for option in options):
        value = f"pretrain/{value}"
    tails = {option.rpartition("/")[2]: option for option in options}
    tail = closest(value.rpartition("/")[2], tails)
    if tail:
        return closest(value, options) or tails[tail]
    return max(options, key=lambda option: _likeness(value, option))


def _likeness(word: str, option: str) -> tuple[int, float]:
    """Options that begin alike come first: `k3-small` means another small model before it means the largest."""
    pairs = zip(word.rpartition("/")[2], option.rpartition("/")[2])
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return common, difflib.SequenceMatcher(None, word, option).ratio()
