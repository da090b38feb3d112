"""What would be wrong: a package that reaches upwards, a start-up that loads torch, an export that doesn't exist."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vidgen

REPOSITORY = Path(vidgen.__file__).parents[1]
PACKAGES = (REPOSITORY / "vidgen", REPOSITORY / "scene_graph")

# Installed by an extra, or heavy and needed by few: imported inside the function that uses them.
OPTIONAL_PACKAGES = {"cv2", "decord", "gradio", "matplotlib", "open_clip", "peft", "tensorboard", "torchmetrics"}
OPTIONAL_PACKAGES |= {"ale_py", "torchvision", "vizdoom", "xformers", "faiss", "gguf", "gymnasium", "torchcodec"}
OPTIONAL_PACKAGES |= {"networkx", "sklearn"}


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_packages_import_only_what_the_contracts_allow(monkeypatch):
    cli = pytest.importorskip("importlinter.cli", reason="needs import-linter (extra: dev)")
    monkeypatch.chdir(REPOSITORY)
    assert cli.lint_imports(config_filename="pyproject.toml", no_cache=True) == 0


@pytest.mark.parametrize("module", ["vidgen", "vidgen.cli.main", "scene_graph"])
def test_start_up_loads_no_heavy_package(module):
    heavy = "{'torch', 'diffusers', 'transformers', 'accelerate', 'numpy', 'av'}"
    loaded = run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))")
    assert loaded.strip() == "[]"


def test_optional_packages_are_imported_where_they_are_used():
    # The page is made of gradio; only the command that starts it imports these modules.
    page = {f"vidgen/demo/{name}.py" for name in ("blocks", "language_tab", "play_tab", "video_tab")} | {
        "scene_graph/demo.py"
    }
    found = []
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found += [
                f"{path.relative_to(REPOSITORY)}:{node.lineno} {name}"
                for name in names
                if name.partition(".")[0] in OPTIONAL_PACKAGES
                and not (str(path.relative_to(REPOSITORY)) in page and name == "gradio")
            ]
    assert not found


@pytest.mark.parametrize("name", vidgen.__all__)
def test_every_export_exists(name):
    assert getattr(vidgen, name) is not None
    assert name in dir(vidgen)


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'vidgen' has no attribute 'nonsense'"):
        vidgen.nonsense  # noqa: B018


@pytest.mark.parametrize("folder", ["training", "eval", "demos"])
def test_script_folders_are_not_packages(folder):
    assert not list((REPOSITORY / folder).rglob("__init__.py"))


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]], ids=["lint", "format"])
def test_style(arguments):
    pytest.importorskip("ruff", reason="needs ruff (extra: dev)")
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
