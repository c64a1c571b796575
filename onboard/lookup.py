"""Find a model's config.json and tensor headers before any work, reading no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard import source
from onboard.checkpoint.headers import INDEX, PICKLES, Header, read_headers
from onboard.errors import EnvironmentFault, InputError
from onboard.recipe import RECIPES, Recipe, merge, parse, read, resolve

PUBLISHED = RECIPES / "configs"  # config.json of the recipes' models, <owner>--<name>.json


@dataclass(frozen=True)
class Found:
    """A model as far as it can be known from its small files.

    `headers` is None where only the config is known; `origin` says what was read, in words.
    """

    recipe: Recipe
    config: Mapping[str, Any]
    path: str  # of config.json, for messages
    headers: Mapping[str, Header] | None
    origin: str


def find(model: str, assignments: Sequence[str] = ()) -> Found:
    """Return what is known of a recipe, YAML file, directory, config.json or Hub id.

    Raises InputError where `model` is none of them, and EnvironmentFault where the Hub cannot be
    reached and no published config.json ships.
    """
    if model.endswith(".json"):
        return _config_alone(Path(model), assignments)
    recipe = resolve(model, assignments)
    where = recipe.source.model
    kind = source.kind_of(where)
    if kind == "package":
        return _package(recipe, where)
    if kind == "directory":
        return _directory(recipe, Path(where).expanduser())
    return _hub(recipe, where)


def published(model: str) -> Path | None:
    """Return the config.json that ships for a Hub id, None where there is none."""
    path = PUBLISHED / f"{model.replace('/', '--')}.json"
    return path if path.is_file() else None


def _config_alone(path: Path, assignments: Sequence[str]) -> Found:
    config = _json(path)
    folder = path.resolve().parent
    base = merge(read(RECIPES / "base.yaml"), {"source": {"model": str(folder)}})
    name = path.stem if path.stem != "config" else folder.name
    recipe = parse(base, name, assignments)
    return Found(recipe, config, str(path), None, f"{path} alone; tensors from the family's table")


def _directory(recipe: Recipe, folder: Path) -> Found:
    config = _json(folder / "config.json")
    names = [path.name for path in folder.iterdir()]
    weights = (INDEX, ".safetensors", *PICKLES)
    if not any(name.endswith(weights) for name in names):
        origin = f"{folder}/config.json alone; tensors from the family's table"
        return Found(recipe, config, f"{folder}/config.json", None, origin)
    headers = read_headers(folder)
    origin = f"{folder}: config.json and safetensors headers"
    return Found(recipe, config, f"{folder}/config.json", headers, origin)


def _hub(recipe: Recipe, model: str) -> Found:
    from onboard.checkpoint import remote

    try:
        held = remote.read(model, recipe.source.revision)
    except EnvironmentFault as fault:
        path = published(model)
        if path is None:
            raise
        origin = (
            f"{fault.message.partition(':')[0]}: the Hub cannot be reached; the published "
            f"config.json that ships with onboard ({path.name}), tensors from the family's table"
        )
        return Found(recipe, _json(path), str(path), None, origin)
    origin = f"{model} at {held.commit[:12]}: config.json and safetensors headers from the Hub"
    return Found(recipe, held.config, f"{model}/config.json", held.headers, origin)


def _package(recipe: Recipe, model: str) -> Found:
    from onboard.checkpoint.gguf import describe

    file = source.packaged(model)
    origin = f"{model}: the GGUF file's own metadata; onboard converts it to bf16"
    return Found(recipe, describe(file), str(file), None, origin)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path.parent}: expected a {path.name}, found none")
    try:
        table = json.loads(path.read_text())
    except ValueError as e:
        raise InputError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a JSON object")
    return table
