"""`vidgen train`: the recipes of the `training` folder, for people who installed the package without it."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

# Recipe -> "module:function"; each function takes (config source, list of key=value overrides).
RECIPES = {
    "landscape_vae": "vidgen.forcing.recipes:train_vae",
    "landscape_text_encoder": "vidgen.forcing.recipes:train_text_encoder",
    "landscape_latents": "vidgen.forcing.recipes:encode_latents",
    "landscape_diffusion": "vidgen.forcing.recipes:train_diffusion",
    "landscape_student": "vidgen.forcing.recipes:train_student",
}


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of: {', '.join(RECIPES)}.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe's config, as `train.max_steps=100`."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A YAML file or the name of a packaged one. Default: the tiny one."),
    ] = None,
) -> None:
    """Train a part of the embedded model. A run that was stopped goes on where it was.

    For several processes run the same recipe from a checkout: `torchrun --nproc_per_node 2 training/RECIPE.py`.
    """
    from vidgen.runtime.errors import suggestion

    if recipe not in RECIPES:
        raise typer.BadParameter(f"no recipe {recipe!r}: {suggestion(recipe, RECIPES)}")
    for override in overrides or ():
        if "=" not in override:
            raise typer.BadParameter(f"{override!r} is not KEY=VALUE, such as train.max_steps=100")
    module, _, function = RECIPES[recipe].partition(":")
    getattr(importlib.import_module(module), function)(config, list(overrides or ()))
