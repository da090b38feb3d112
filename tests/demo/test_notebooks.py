"""The notebooks run from beginning to end, in a fresh kernel and without a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "demos").glob("*.ipynb"))


def test_the_notebooks_are_there_and_carry_no_output() -> None:
    nbformat = pytest.importorskip("nbformat")
    names = {path.stem for path in NOTEBOOKS}
    assert {"long_video", "prompt_switching_and_memory", "scene_graphs", "world_model_env"} <= names
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if path.stem == "world_model_env":
        pytest.importorskip("gymnasium")
    if path.stem == "scene_graphs":
        pytest.importorskip("matplotlib")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    # Away from the checkout, whose runs/ may hold a trained model on one machine and not on another.
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    pictures = [output for output in outputs_of(notebook) if "image/png" in output.get("data", {})]
    assert pictures


def outputs_of(notebook: Any) -> list[Any]:
    """What the cells printed and showed."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
