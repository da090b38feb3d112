"""Where the files that travel with vidgen are: in a wheel inside the package, in a checkout beside it."""

from __future__ import annotations

from pathlib import Path

from .errors import VidgenError, suggestion

DEFAULT_MODEL = "landscape-tiny"

_PACKAGE = Path(__file__).resolve().parents[1]
ASSET_FOLDERS = (_PACKAGE / "assets", _PACKAGE.parent / "assets")


class AssetError(VidgenError):
    """A file that should travel with vidgen isn't there."""


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
    present = {path.name for folder in ASSET_FOLDERS if folder.is_dir() for path in folder.iterdir()}
    raise AssetError(f"no embedded asset {name!r}: {suggestion(name, present)}")
