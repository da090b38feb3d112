"""What would be wrong: results of one benchmark that another overwrites, or finds unreadable after hours of work."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

EVAL = Path(__file__).resolve().parents[2] / "eval"
NEEDED = {"video_scene_graph": ["video.mp4", "--model", "nowhere"]}


@pytest.mark.parametrize("name", sorted(path.stem for path in EVAL.glob("[!_]*.py")))
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"benchmark": "another", "smoke": False}), "holds another, not results of"),
        (json.dumps({"smoke": False}), "holds nothing that says which benchmark it is of"),
        (json.dumps([1]), "holds nothing that says which benchmark it is of"),
        ('{"benchmark": "lost in the mid', "holds no JSON"),
    ],
)
def test_other_results_are_left_alone_and_named_before_any_work(name, content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EVAL)
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main([*NEEDED.get(name, []), "--out", str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and f"error: argument --out: {tmp_path}/results.json {message}" in last
    assert (tmp_path / "results.json").read_text() == content
