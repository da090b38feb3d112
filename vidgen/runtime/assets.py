"""Where models are: those that travel with vidgen, in a wheel inside the package or in a checkout beside it; and
others, in folders or on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import VidgenError, suggestion

DEFAULT_MODEL = "landscape-tiny"
DEFAULT_WORLD_MODEL = "doom-tiny"
DEFAULT_SCENE_GRAPH_MODEL = "sgg-tiny"
DEFAULT_LANGUAGE_MODEL = "lm-tiny"

_PACKAGE = Path(__file__).resolve().parents[1]
ASSET_FOLDERS = (_PACKAGE / "assets", _PACKAGE.parent / "assets")


class AssetError(VidgenError):
    """A model isn't where it should be."""


def find_asset(name: str = DEFAULT_MODEL) -> Path:
    """Locates an embedded asset such as the default model's folder.

    Args:
        name: Path below the assets folder.

    Returns:
        Its absolute path.

    Raises:
        AssetError: No asset of that name is installed; the message names the nearest one.
    """
    for folder in ASSET_FOLDERS:
        if (folder / name).exists():
            return folder / name
    present = {path.name for folder in ASSET_FOLDERS if folder.is_dir() for path in folder.iterdir() if path.is_dir()}
    raise AssetError(f"no embedded asset {name!r}: {suggestion(name, present)}")


def is_hub_id(name: str | os.PathLike) -> bool:
    """Whether a model's name can only be that of a repository on the Hub: owner/name, and no folder `owner` here."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)) is not None and not Path(name).parent.is_dir()


def require_model(name: str | os.PathLike, maker: str) -> None:
    """Refuses a folder that isn't there, before the Hub is asked for a model of that name.

    Args:
        name: Model folder, or owner/name on the Hub.
        maker: What makes such a folder.

    Raises:
        AssetError: It is neither.
    """
    if not Path(name).is_dir() and not is_hub_id(name):
        raise AssetError(f"there is no folder {name}; it is made by {maker}, or give owner/name on the Hub.")
