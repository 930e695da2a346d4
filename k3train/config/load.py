"""From overrides to a typed recipe: Hydra composes the YAML files under `recipes/` onto the schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from k3train.config.explain import missing_value, plain_errors
from k3train.config.keys import default_of
from k3train.config.overrides import check_overrides, group_options
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

CONFIG_NAME = "config"
ConfigStore.instance().store(name="k3train_schema", node=RecipeConfig, provider="k3train")


def recipes_dir() -> Path:
    """The folder with the Hydra recipes: beside the package, wherever the working directory is.

    Raises UserError where it is absent, which means the package was installed without its checkout.
    """
    folder = Path(__file__).resolve().parents[2] / "recipes"
    if not (folder / f"{CONFIG_NAME}.yaml").is_file():
        raise UserError(
            f"the recipes folder {folder} does not exist; k3train runs from its checkout: clone the"
            " repository and install it with `pip install -e .`"
        )
    return folder


def load_recipe(overrides: list[str], config_dir: str | Path | None = None) -> RecipeConfig:
    """Compose a typed recipe from overrides such as `recipe=pretrain/k3-tiny` and `optim.lr=1e-3`.

    `config_dir` is searched after the shipped recipes (`--config-dir` on the command line). Types and key
    names are checked; whether the values work together is for `k3train.config.validate.validate`.

    Raises UserError for an unknown key, group or recipe, a wrong type, or a missing mandatory value.
    """
    return recipe_from_config(compose_config(overrides, config_dir))


def recipe_from_dict(saved: dict[str, Any]) -> RecipeConfig:
    """A typed recipe from plain nested dicts, e.g. the resolved config that a run saved.

    Keys that are absent get the schema's defaults. Raises UserError for an unknown key or a wrong type.
    """
    with plain_errors():
        merged = OmegaConf.merge(OmegaConf.structured(RecipeConfig), OmegaConf.create(saved))
    return recipe_from_config(merged)


def recipe_from_config(config: DictConfig) -> RecipeConfig:
    """The dataclasses of a composed config, interpolations resolved. UserError where a value is missing."""
    with plain_errors():
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise missing_value(missing[0])
        OmegaConf.resolve(config)
        return OmegaConf.to_object(config)


def compose_config(overrides: list[str], config_dir: str | Path | None = None) -> DictConfig:
    """The composed config without Hydra's own node, typed by the schema, interpolations unresolved."""
    with hydra_session(config_dir) as hydra:
        check_overrides(overrides, hydra)
        return compose_within(hydra, overrides)


def compose_within(hydra: Hydra, overrides: list[str]) -> DictConfig:
    """`compose_config` in a session that is open already, for overrides that were checked."""

    def recipe_value(key: str) -> Any:
        """What the chosen groups say, before the command line changes single keys."""
        chosen = [text for text in overrides if "." not in text.partition("=")[0]]
        try:
            value = OmegaConf.select(_compose(hydra, chosen), key)
        except (HydraException, OmegaConfBaseException):
            return default_of(key)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    with plain_errors(recipe_value):
        config = _compose(hydra, overrides)
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config


def _compose(hydra: Hydra, overrides: list[str]) -> DictConfig:
    return hydra.compose_config(
        config_name=CONFIG_NAME,
        overrides=overrides,
        run_mode=RunMode.RUN,
        from_shell=False,
        with_log_configuration=False,
    )


@contextmanager
def hydra_session(config_dir: str | Path | None = None) -> Iterator[Hydra]:
    """Hydra over the shipped recipes and, after them, the user's own config directory."""
    search_path = create_config_search_path(str(recipes_dir()))
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise UserError(
                f"--config-dir={config_dir} is not a directory; give one that holds groups such as recipe/ or model/"
            )
        before_schemas = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{folder}", anchor=before_schemas)
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2("k3train", search_path)
    finally:
        GlobalHydra.instance().clear()


def available_recipes(config_dir: str | Path | None = None) -> list[str]:
    """What `recipe=` may name."""
    with hydra_session(config_dir) as hydra:
        return group_options(hydra, "recipe")
