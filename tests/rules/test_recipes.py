"""Every recipe in the repository parses under the strict reader, and says what it is for."""

import tomllib
from pathlib import Path

import pytest

from tracefp4.cli.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(path):
    config = load_config(path)
    assert config.run.dir.startswith("runs/")
    assert path.read_text(encoding="utf-8").startswith("# "), (
        "a recipe opens with a comment on what it is for"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_names_only_tables_of_a_run(path):
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert {"model", "task"} <= set(table)
