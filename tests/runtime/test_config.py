from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

import vidgen.runtime.config as config_module
from vidgen.runtime.config import find_config, load_config, to_yaml
from vidgen.runtime.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-3
    kind: Literal["plain", "fancy"] = "plain"
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr={self.lr}; it must be positive")


@dataclass(frozen=True)
class Outer:
    output_dir: str
    width: int = 64
    minutes: float | None = None
    names: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)
    roles: dict[str, Inner] = field(default_factory=dict)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write(
        tmp_path / "a.yaml", "output_dir: runs/a\nwidth: 96\ninner: {lr: 1e-4}\nroles:\n  student: {lr: 3e-4}\n"
    )
    config = load_config(Outer, path, ["width=128", "roles.student.betas=[0.5,0.6]", "names=[a,b]", "minutes=1.5"])
    assert config == Outer(
        "runs/a", 128, 1.5, ("a", "b"), Inner(lr=1e-4), {"student": Inner(lr=3e-4, betas=(0.5, 0.6))}
    )


def test_yaml_round_trip(tmp_path):
    config = Outer("x", minutes=None, names=("a",), roles={"critic": Inner(kind="fancy")})
    assert load_config(Outer, write(tmp_path / "a.yaml", to_yaml(config))) == config


def test_mapping_source():
    assert load_config(Outer, {"output_dir": "x", "inner": {"kind": "fancy"}}).inner.kind == "fancy"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("outptu_dir: x", [], r"a\.yaml: unknown key 'outptu_dir': did you mean 'output_dir'\?"),
        ("output_dir: x\ninner: {lrr: 1}", [], r"a\.yaml: unknown key 'inner\.lrr': did you mean 'lr'\?"),
        ("output_dir: x\nroles: {student: {bta: 1}}", [], r"unknown key 'roles\.student\.bta': did you mean 'betas'"),
        ("output_dir: x", ["widht=3"], r"override 'widht=3': unknown key 'widht': did you mean 'width'\?"),
        ("output_dir: x", ["inner.lrr=3"], r"unknown key 'inner\.lrr': did you mean 'lr'\?"),
        ("output_dir: x\nwidth: many", [], r"a\.yaml: key 'width': .*'many'.*Integer"),
        ("output_dir: x\ninner: {kind: odd}", [], r"key 'inner\.kind': .*'odd'.*'plain', 'fancy'"),
        ("output_dir: x\ninner: [1]", [], r"a\.yaml: .*list"),
        ("output_dir: x\ninner: {lr: -1}", [], r"a\.yaml: .*lr=-1\.0; it must be positive"),
        ("width: 3", [], r"a\.yaml: key 'output_dir' has no default and must be given"),
        ("output_dir: [", [], r"a\.yaml: not a readable YAML file"),
        ("- 1\n- 2", [], r"a\.yaml: expected `key: value` lines .* found a list"),
        ("output_dir: x", ["width"], r"override 'width': expected key=value"),
        ("output_dir: x", ["names=[a"], r"override 'names=\[a'"),
    ],
)
def test_mistakes_are_one_line_that_names_place_and_remedy(tmp_path, text, overrides, message):
    path = write(tmp_path / "a.yaml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(Outer, path, overrides)
    assert "\n" not in str(caught.value)


def test_names_are_looked_up_in_the_package_before_the_repository(tmp_path, monkeypatch):
    package, repository = tmp_path / "package", tmp_path / "repository"
    monkeypatch.setattr(config_module, "CONFIG_FOLDERS", (package, repository))
    first = write(package / "landscape" / "tiny_vae.yaml", "")
    write(repository / "landscape" / "tiny_vae.yaml", "")
    second = write(repository / "landscape" / "tiny_v1.5.yaml", "")
    assert find_config("landscape/tiny_vae") == first
    assert find_config("landscape/tiny_vae.yaml") == first
    assert find_config("landscape/tiny_v1.5") == second
    with pytest.raises(ConfigError, match=r"no config 'landscape/tiny_vea'.*did you mean 'landscape/tiny_vae'"):
        find_config("landscape/tiny_vea")


def test_a_path_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.yaml", "output_dir: here\n")
    assert load_config(Outer, "mine.yaml").output_dir == "here"
