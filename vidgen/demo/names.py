"""Short names of model folders, for people to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vidgen.runtime.errors import VidgenError


def folder_names(folders: Sequence[Path]) -> dict[str, Path]:
    """A short name for each folder: its own, with as many parents as tell it from the others.

    Raises:
        VidgenError: a folder is given twice.
    """
    folders = [folder.resolve() for folder in folders]
    if len(set(folders)) != len(folders):
        raise VidgenError("a model is given twice; each is shown once.")
    names: dict[str, Path] = {}
    for folder in folders:
        for count in range(1, len(folder.parts) + 1):
            name = "/".join(folder.parts[-count:])
            if all(other == folder or "/".join(other.parts[-count:]) != name for other in folders):
                break
        names[name] = folder
    return names
