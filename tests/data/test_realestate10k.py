"""Imported clips must keep their cameras, and broken ones must be left out with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vidgen.controls import PoseControls, camera_deltas, integrate_cameras, walking_cameras
from vidgen.controls.cameras import CAMERA_SPEC
from vidgen.data import DatasetError, EpisodeDataset, VideoWriter, import_realestate10k
from vidgen.worlds.room import RoomWorld

FRAMES = 12


def write_clip(
    tree: Path, split: str, name: str, seed: int, num_cameras: int = FRAMES
) -> tuple[np.ndarray, torch.Tensor]:
    world = RoomWorld(32)
    scene = world.scene(seed)
    poses = world.explore(scene, FRAMES, seed)
    frames, cameras = world.render(scene, poses), walking_cameras(torch.from_numpy(poses), world.focal, 0.6)
    (tree / f"{split}_256").mkdir(parents=True, exist_ok=True)
    (tree / f"{split}_poses").mkdir(exist_ok=True)
    with VideoWriter(tree / f"{split}_256" / f"{name}.mp4", fps=10) as writer:
        writer.append(frames)
    rows = torch.cat([cameras[:, :4], torch.zeros(FRAMES, 2), cameras[:, 4:]], dim=1).float()
    torch.save(rows[:num_cameras].clone(), tree / f"{split}_poses" / f"{name}.pt")
    return frames, rows


def change(tree: Path, name: str, rows: object) -> None:
    torch.save(rows, tree / "training_poses" / f"{name}.pt")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for seed, name in enumerate("abcdef"):
        _, rows = write_clip(tmp_path / "tree", "training", name, seed, FRAMES - (name == "c"))
    change(tmp_path / "tree", "d", torch.full_like(rows, torch.nan))
    change(tmp_path / "tree", "e", torch.cat([rows[:, :6], 2 * rows[:, 6:]], dim=1))
    write_clip(tmp_path / "tree", "test", "z", 9)
    return tmp_path / "tree"


def test_cameras_come_back_and_broken_clips_are_left_out(tree: Path, tmp_path: Path):
    (tree / "training_poses" / "f.pt").write_bytes(b"no tensor")
    (tree / "training_256" / "0.mp4").write_bytes(b"no video")
    (tree / "training_poses" / "0.pt").write_bytes((tree / "training_poses" / "a.pt").read_bytes())
    report = import_realestate10k(tree, tmp_path / "set")
    assert report.added == 3
    reasons = {Path(name).stem: reason for name, reason in report.rejected.items()}
    assert set(reasons) == {"0", "c", "d", "e", "f"}
    assert "11 cameras for 12 frames" in reasons["c"]
    assert "frame 0 is not finite" in reasons["d"] and "no rotation" in reasons["e"] and "cannot read" in reasons["f"]

    frames, rows = write_clip(tmp_path / "again", "training", "b", 1)
    cameras = torch.cat([rows[:, :4], rows[:, 6:]], dim=1).double()
    train = EpisodeDataset(tmp_path / "set", window=4, skip=2, controls="cameras")
    assert [item.seed for item in train.episodes] == [1, 2]  # a and b, after 0
    assert np.abs(train.frames(1).astype(int) - frames).mean() < 6
    window = train[len(train) - 1]  # frames 5, 7, 9 and 11 of b
    assert torch.equal(window["controls"], cameras[5::2])
    PoseControls(CAMERA_SPEC).spec.check(window["controls"])
    moving = EpisodeDataset(tmp_path / "set", window=4, skip=2)[len(train) - 1]["controls"]
    torch.testing.assert_close(moving, camera_deltas(cameras[5::2]))
    torch.testing.assert_close(integrate_cameras(cameras[5], moving), cameras[5::2], rtol=0, atol=1e-5)
    assert len(EpisodeDataset(tmp_path / "set", "test", window=FRAMES)) == 1


def test_an_import_goes_on_where_it_ended(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tree / "training_256" / "f.mp4").unlink()
    monkeypatch.setattr("vidgen.data.episode_writer.EPISODES_PER_FILE", 1)
    assert import_realestate10k(tree, tmp_path / "set").added == 3
    write_clip(tree, "training", "g", 6)
    report = import_realestate10k(tree, tmp_path / "set")
    assert (report.added, len(report.rejected)) == (1, 3)
    episodes = EpisodeDataset(tmp_path / "set", window=2).episodes
    assert [item.seed for item in episodes] == [0, 1, 5]


def test_a_folder_without_clips(tmp_path: Path):
    with pytest.raises(DatasetError, match="expected training_256/"):
        import_realestate10k(tmp_path, tmp_path / "set")
    (tmp_path / "test_256").mkdir()
    (tmp_path / "test_256" / "a.mp4").write_bytes(b"no video")
    with pytest.raises(DatasetError, match="none of 1 clips can be read"):
        import_realestate10k(tmp_path, tmp_path / "set")
