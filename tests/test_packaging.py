"""What would be wrong: a wheel that installs stray top-level packages, or lacks the configs or the embedded model."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vidgen

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs hatchling (extra: dev)")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_installs_its_two_packages_and_nothing_else(wheel):
    top_level = {name.partition("/")[0] for name in wheel.namelist()}
    assert top_level == {"vidgen", "scene_graph", f"vidgen-{vidgen.__version__}.dist-info"}


@pytest.mark.parametrize("folder", ["configs", "assets"])
def test_wheel_carries_every_file_the_package_looks_up(wheel, folder):
    tracked = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert tracked
    packaged = {name.removeprefix("vidgen/") for name in wheel.namelist() if name.startswith(f"vidgen/{folder}/")}
    assert tracked == packaged


def test_wheel_carries_every_module(wheel):
    modules = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ("vidgen", "scene_graph")
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert modules <= set(wheel.namelist())


def test_files_stay_small_enough_to_clone():
    sizes = {path: path.stat().st_size for path in (REPOSITORY / "assets").rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 80e6
    assert max(sizes.values()) <= 25e6


def test_metadata_agrees_with_the_package(wheel):
    name = f"vidgen-{vidgen.__version__}.dist-info/METADATA"
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == PROJECT["project"]["version"] == vidgen.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_extra_all_names_only_extras_that_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("vidgen[").removesuffix("]").split(",")
    # dev is for contributors; gpu holds kernels that need a matching torch build.
    assert set(named) == set(extras) - {"all", "dev", "gpu"}


def test_a_bare_torch_pin_is_never_written():
    requirements = PROJECT["project"]["dependencies"]
    assert not [requirement for requirement in requirements if "==" in requirement]


@pytest.fixture(scope="module")
def pins():
    """What constraints.txt pins."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in named.items()}


def test_constraints_pin_everything_that_their_command_installs(pins):
    header = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    extras = re.search(r"\.\[(.+)\]", header).group(1).split(",")
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert f".[{','.join(extras)}]" in ci
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, asked):
        if requirement.name != project["name"]:
            version = pins.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} has no line"
            assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_constraints_can_be_installed_together(pins):
    for name, version in pins.items():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.version != version:  # what another version requires isn't known here
            continue
        for requirement in map(Requirement, package.requires or ()):
            pinned = pins.get(canonicalize_name(requirement.name))
            if pinned is not None and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                assert requirement.specifier.contains(pinned), f"{name} {version} needs {requirement}, not {pinned}"
