"""The command line that every training script shares: `--config FILE [key.sub=value ...]`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from typing import Any


def main(recipe: Callable[[str | None, list[str]], Any], default_config: str) -> None:
    """Run a recipe with the arguments of this process; bad arguments end it with one line and exit code 2."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(recipe), allow_abbrev=False)
    parser.add_argument("--config", default=default_config, help="YAML file or name; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's")
    arguments = parser.parse_args()
    try:
        result = recipe(arguments.config, arguments.overrides)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(result)
