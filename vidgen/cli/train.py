"""`vidgen train`: the recipes of the `training` folder, for people who installed the package without it."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

INTERRUPTED = 130

# Recipe -> the function "module:name", which takes (config, list of key=value), and the config it uses unless told.
RECIPES = {
    "landscape_vae": ("vidgen.recipes.landscape:train_vae", "landscape/tiny_vae"),
    "landscape_text_encoder": ("vidgen.recipes.landscape:train_text_encoder", "landscape/tiny_text_encoder"),
    "landscape_latents": ("vidgen.recipes.landscape:encode_latents", "landscape/tiny_latents"),
    "landscape_diffusion_chunks": ("vidgen.recipes.landscape:train_diffusion", "landscape/tiny_diffusion_chunks"),
    "landscape_diffusion": ("vidgen.recipes.landscape:train_diffusion", "landscape/tiny_diffusion"),
    "landscape_student": ("vidgen.recipes.landscape:train_student", "landscape/tiny_student"),
    "landscape_assemble": ("vidgen.recipes.landscape:assemble", "landscape/tiny_assemble"),
    "context_forcing_teacher": ("vidgen.recipes.context_forcing:train_teacher", "context_forcing/tiny_teacher"),
    "context_forcing_stage1": ("vidgen.recipes.context_forcing:distill", "context_forcing/tiny_stage1"),
    "context_forcing_stage2": ("vidgen.recipes.context_forcing:distill", "context_forcing/tiny_stage2"),
    "frame_autoencoder": ("vidgen.recipes.world_model:train_frame_autoencoder", "live/vizdoom64_autoencoder"),
    "world_model": ("vidgen.recipes.world_model:train_world_model", "live/vizdoom64_df"),
    "world_model_assemble": ("vidgen.recipes.world_model:assemble_world_model", "live/vizdoom64_assemble"),
    "lm_tokenizer": ("vidgen.recipes.language_model:prepare_corpus", "lm/tiny_tokenizer"),
    "lm_causal": ("vidgen.recipes.language_model:train_causal_lm", "lm/tiny_causal"),
    "lm_assemble": ("vidgen.recipes.language_model:assemble_language_model", "lm/tiny_assemble"),
    "dllm_base": ("vidgen.recipes.dllm:train_masked_diffusion", "dllm/tiny_base"),
    "dllm_rcd": ("vidgen.recipes.dllm:train_residual_context", "dllm/tiny_rcd"),
    "dllm_mask_agnostic": ("vidgen.recipes.dllm:train_mask_agnostic", "dllm/mask_agnostic_tiny"),
}


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of: {', '.join(RECIPES)}.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe's config, as `train.max_steps=100`."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A YAML file, or the name of a packaged one. Default: the tiny one."),
    ] = None,
) -> None:
    """Run a training recipe. A run that was stopped goes on where it was.

    For several processes run the same recipe from a checkout: `torchrun --nproc_per_node 2 training/RECIPE.py`.
    """
    run_recipe("vidgen train", RECIPES, recipe, list(overrides or ()), config)


def run_recipe(
    command: str, recipes: Mapping[str, tuple[str, str]], recipe: str, overrides: list[str], config: str | None
) -> None:
    """Runs a recipe, and tells how to go on when it is stopped; for commands of other packages too.

    Args:
        command: how the user calls it, without the recipe.
        recipes: Recipe -> its function as "module:name", and the config it uses unless told.
        recipe: which one.
        overrides: changes to the config, `key=value`.
        config: a YAML file or the name of a packaged one; None for the recipe's own.

    Raises:
        BadParameter: an unknown recipe or what is no change.
    """
    from vidgen.runtime.errors import suggestion

    if recipe not in recipes:
        raise typer.BadParameter(f"no recipe {recipe!r}: {suggestion(recipe, recipes)}")
    for override in overrides:
        if "=" not in override:
            raise typer.BadParameter(f"{override!r} is not KEY=VALUE, such as train.max_steps=100")
    target, default_config = recipes[recipe]
    module, _, function = target.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(config or default_config, overrides)
    except KeyboardInterrupt as stop:
        again = [*command.split(), recipe, *overrides, *(["--config", config] if config else [])]
        print(f"{str(stop) or 'stopped'}; go on with: {shlex.join(again)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from stop
    print(result)
