"""Reading and checking a cluster file; what is wrong is said with the key and the cure."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from k3train.config.cluster import ClusterConfig
from k3train.config.keys import closest
from k3train.config.load import recipes_dir
from k3train.config.rules import check_choice, check_range, refuse
from k3train.errors import UserError

_POSITIVE = {"memory_gib": 80, "memory_gbs": 3350, "fast_gbs": 450, "network_gbs": 50}


@dataclass
class _Holder:
    """So that keys read `cluster.memory_gib`."""

    cluster: ClusterConfig


def available_clusters() -> list[str]:
    """The names that `cluster=` takes besides paths."""
    return sorted(path.stem for path in (recipes_dir() / "cluster").glob("*.yaml"))


def load_cluster(name: str, overrides: dict[str, str]) -> ClusterConfig:
    """The cluster of a shipped name or a file, with `cluster.KEY=VALUE` overrides (keys without `cluster.`).

    Raises:
        UserError: no such file or key, a value of the wrong type, missing or out of range.
    """
    path = recipes_dir() / "cluster" / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = available_clusters()
        raise UserError(
            f"cluster={name} is neither a shipped cluster nor a file; allowed: {', '.join(known)}, or the path of a"
            f" YAML file with the same keys; try cluster={closest(name, known) or known[0]}"
        )
    try:
        content = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cluster={name}: {path} cannot be read as YAML ({reason}); mend the file") from error
    if not OmegaConf.is_dict(content):
        raise UserError(
            f"cluster={name}: {path} holds no mapping; write keys as in recipes/cluster/{available_clusters()[0]}.yaml"
        )
    merged = OmegaConf.structured(ClusterConfig)
    for key, value in _flat(OmegaConf.to_container(content)):
        _set(merged, key, value, str(path))
    for key, value in overrides.items():
        _set(merged, key, _parsed(key, value), "the command line")
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise UserError(f"cluster.{missing[0]} has no value in {path}; add a line `{missing[0]}: ...` to it")
    cluster = OmegaConf.to_object(merged)
    check_cluster(cluster)
    return cluster


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse figures that no machine has.

    Raises:
        UserError: naming the key, what is allowed, and the cure.
    """
    held = _Holder(cluster)
    check_choice(held, "cluster.kind", ("cuda", "cpu"))
    for key, cure in _POSITIVE.items():
        check_range(held, f"cluster.{key}", cure, above=0)
    for key, cure in (("latency_us", 20), ("launch_us", 4), ("storage_gbs", 0), ("reserved_gib", 4)):
        check_range(held, f"cluster.{key}", cure, least=0)
    check_range(held, "cluster.fast_domain", 8, least=1)
    check_range(held, "cluster.max_over_mean", 1, least=1)
    if cluster.devices is not None:
        check_range(held, "cluster.devices", "null", least=1)
    for key in ("fp32", "bf16", "fp8"):
        check_range(held, f"cluster.peak_tflops.{key}", 0, least=0)
    for entry in fields(cluster.efficiency):
        check_range(held, f"cluster.efficiency.{entry.name}", entry.default, above=0, most=1)
    if cluster.reserved_gib >= cluster.memory_gib:
        raise refuse(
            held,
            "cluster.reserved_gib",
            f"leaves nothing of cluster.memory_gib={cluster.memory_gib:g}",
            f"less than {cluster.memory_gib:g}",
            f"cluster.reserved_gib={cluster.memory_gib / 20:.3g}",
        )


def _keys(cls: type = ClusterConfig, prefix: str = "") -> list[str]:
    """Every settable key as a dotted path."""
    found = []
    for name, hint in get_type_hints(cls).items():
        found += _keys(hint, f"{prefix}{name}.") if is_dataclass(hint) else [f"{prefix}{name}"]
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in tree.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return flat


def _parsed(key: str, text: str) -> Any:
    try:
        return OmegaConf.create(f"value: {text}").value
    except (YAMLError, OmegaConfBaseException, AttributeError) as error:
        raise UserError(f"cluster.{key}={text} cannot be read; write cluster.{key}=VALUE") from error


def _set(merged: Any, key: str, value: Any, where: str) -> None:
    known, shown = _keys(), "null" if value is None else value
    if parts := [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]:
        raise UserError(
            f"cluster.{key}={shown} in {where} has the wrong type: it is a section; allowed: {', '.join(parts)} under"
            f" it, each a number; try cluster.{key}.{parts[0]}=..., or leave the section out"
        )
    if key not in known:
        near = closest(key, known)
        hint = f"; try cluster.{near}" if near else ""
        raise UserError(f"cluster.{key} in {where} is no key; allowed: {', '.join(known)}{hint}")
    try:
        OmegaConf.update(merged, key, value)
    except OmegaConfBaseException as error:
        wanted = {"name": "text", "device": "text", "kind": "cuda or cpu", "devices": "a whole number or null"}
        allowed = wanted.get(key, "a whole number" if key == "fast_domain" else "a number")
        raise UserError(
            f"cluster.{key}={shown} in {where} has the wrong type; allowed: {allowed}; try to correct it"
        ) from error
