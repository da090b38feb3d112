"""What recipes share: how (config, overrides) run one, and the command line `--config FILE [key.sub=value ...]`."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from vidgen.runtime.config import load_config
from vidgen.runtime.device import set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.train import TrainingMethod, TrainResult, fit_recipe

USER_ERROR, INTERRUPTED = 2, 130

Schema = TypeVar("Schema")


def training_recipe(
    schema: type[Schema],
) -> Callable[[Callable[[Schema], tuple[TrainingMethod, Any]]], Callable[[str | None, list[str]], TrainResult]]:
    """Makes a training of a function that builds method and data of a config with a `train`.

    The training takes the name of a config and overrides. All trainings are run here, so that none starts in a folder
    that is in use or was begun with other settings.
    """

    def decorate(
        build: Callable[[Schema], tuple[TrainingMethod, Any]],
    ) -> Callable[[str | None, list[str]], TrainResult]:
        @functools.wraps(build)
        def train(source: str | None, overrides: list[str]) -> TrainResult:
            config = load_config(schema, source, overrides)
            set_threads()
            return fit_recipe(config, build)

        return train

    return decorate


def require_parts(parts: Iterable[tuple[str | Path, str]]) -> None:
    """Refuses to start without what other recipes make, before anything looks for it on the Hugging Face Hub.

    Args:
        parts: A file or folder, and what makes it.

    Raises:
        ConfigError: One of them does not exist.
    """
    for path, maker in parts:
        if not Path(path).exists():
            raise ConfigError(f"{path} does not exist; it is made by {maker}.")


def main(recipe: Callable[[str | None, list[str]], Any], default_config: str) -> None:
    """Run a recipe with the arguments of this process; bad arguments end it with one line and exit code 2."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(recipe), allow_abbrev=False)
    parser.add_argument("--config", default=default_config, help="YAML file or name; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's")
    arguments = parser.parse_args()
    first = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    try:
        result = recipe(arguments.config, arguments.overrides)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt as stop:
        if first:
            print(f"{str(stop) or 'stopped'}; the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if first:
        print(result)
