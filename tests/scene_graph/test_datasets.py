"""Frames get their own images and labels from every layout, and whatever is wrong with a folder is said by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from scene_graph.datasets import MMORDataset, OR4DDataset, SceneFolder, VideoFrames
from scene_graph.formats import (
    LabeledFrame,
    complete_relations,
    mirrored_relations,
    write_graphs,
    write_mmor_relations,
    write_or4d_relations,
)
from scene_graph.schema import SceneDataError, SceneGraph, SceneGraphError, Triplet
from vidgen.data import VideoDecodeError

DRILL = Triplet("head surgeon", "drilling", "patient")
NEAR = Triplet("circulator", "closeTo", "secondary table")
ROWS = [
    [],
    [["human_1", "CloseTo", "secondary_table"]],
    [["human_0", "Drilling", "Patient"], ["human_1", "CloseTo", "secondary_table"]],
]
HUMANS = {"human_0": "head-surgeon", "human_1": "circulating-nurse"}
MMOR_ROWS = [[["head_surgeon", "Drilling", "patient"]], [], [["mps", "Calibrating", "tracker"]]]


def gray(image: np.ndarray) -> int:
    return round(float(image.mean()))


@pytest.fixture
def or4d(builders, tmp_path: Path) -> Path:
    """All ten takes of 4D-OR with 3 frames each, labels of single frames."""
    root = tmp_path / "4D-OR_data"
    for number in range(1, 11):
        builders.write_or4d_take(root, number, ROWS, HUMANS)
    return root


@pytest.fixture
def mmor(builders, tmp_path: Path) -> Path:
    """The validation takes of MM-OR, one without room cameras, and two takes that share a folder."""
    root = tmp_path / "MM-OR_data"
    builders.write_mmor_take(root, "002_PKA", MMOR_ROWS)
    builders.write_mmor_take(root, "007_TKA", [*MMOR_ROWS, *MMOR_ROWS])
    builders.write_mmor_take(root, "009_TKA", MMOR_ROWS, with_azure=False)
    for number, take in enumerate(("015_PKA", "016_PKA")):
        builders.write_mmor_take(
            root, take, MMOR_ROWS[number:], folder="015-018_PKA", first_image=7000 + 300 * number, suffix=True
        )
    return root


# ------------------------------------------------------------------------------------------------ 4D-OR


@pytest.mark.parametrize(
    ("split", "takes"),
    [
        ("train", ("001", "003", "005", "007", "009", "010")),
        ("val", ("004", "008")),
        ("validation", ("004", "008")),
        ("test", ("002", "006")),
    ],
)
def test_4dor_is_split_by_take(or4d: Path, split: str, takes: tuple[str, ...]) -> None:
    data = OR4DDataset(or4d, split)
    assert data.takes == tuple(f"{take}_4DOR" for take in takes) and len(data) == 3 * len(takes)
    assert data.has_labels and len(data.graphs()) == len(data)


def test_frames_of_4dor_get_their_own_images_through_the_list_of_timestamps(or4d: Path) -> None:
    data = OR4DDataset(or4d, "test", views=(2, 1, 3, 5))
    sample = data.find("006_4DOR_000002")
    assert (sample.take, sample.frame, sample.seconds) == ("006_4DOR", 2, 2.0)
    assert sample.view_names == ("camera02", "camera01", "camera03", "camera05")
    assert [gray(image) for image in sample.images()] == [22, 12, 32, 52]
    assert gray(sample.image()) == 22 and sample.meta["timestamp"] == "1600000002"
    assert sample.meta["humans"] == HUMANS
    assert [len(s.views) for s in data[:2]] == [4, 4] and data[-1].frame == 2


def test_both_label_styles_come_from_every_kind_of_label_file(or4d: Path, tmp_path: Path) -> None:
    forward = complete_relations(SceneGraph([DRILL, NEAR]))
    expected = {"mmor": forward, "raw": mirrored_relations(forward)}
    assert len(expected["mmor"]) == 5 and len(expected["raw"]) == 10
    raw, mmor = tmp_path / "raw.json", tmp_path / "mmor.json"
    write_or4d_relations(raw, [LabeledFrame("002_4DOR", 2, expected["raw"], HUMANS)])
    write_mmor_relations(mmor, [LabeledFrame("002_4DOR", 2, forward), LabeledFrame("004_PKA_MMOR", 2, forward)])
    for style, graph in expected.items():
        for labels in (None, raw, mmor):
            data = OR4DDataset(or4d, "test", takes=[2], label_style=style, labels=labels)
            assert data.find("002_4DOR_000002").graph == graph
            assert data.takes == ("002_4DOR",)


@pytest.mark.parametrize("folder", [".", "data"])
def test_an_aggregated_file_in_the_folder_comes_before_single_files(or4d: Path, folder: str) -> None:
    (or4d / folder).mkdir(exist_ok=True)
    write_or4d_relations(or4d / folder / "relationships_validation.json", [LabeledFrame("004_4DOR", 1, SceneGraph())])
    data = OR4DDataset(or4d, "val")
    assert [sample.id for sample in data] == ["004_4DOR_000001"] and data.graphs() == [SceneGraph()]


def test_empty_graphs_are_labels(or4d: Path) -> None:
    data = OR4DDataset(or4d, "test", takes=["006_4DOR"])
    assert data[0].graph is not None and len(data[0].graph) == 0 and data.has_labels


def test_the_dummy_test_file_can_be_predicted_but_not_scored(or4d: Path) -> None:
    (or4d / "data").mkdir()
    scans = [{"take_idx": 2, "scan": f"{frame:06d}"} for frame in range(3)]
    (or4d / "data" / "relationships_test_dummy.json").write_text(json.dumps({"scans": scans}))
    data = OR4DDataset(or4d, "test")
    assert len(data) == 3 and gray(data[0].image()) == 20 and not data.has_labels
    with pytest.raises(SceneDataError, match="no labels for 002_4DOR_000000"):
        data.graphs()


def test_absent_test_labels_leave_every_frame_of_the_list_but_absent_training_labels_are_an_error(or4d: Path) -> None:
    for number in (1, 2):
        shutil.rmtree(or4d / f"export_holistic_take{number}_processed" / "relation_labels")
    data = OR4DDataset(or4d, "test", takes=[2])
    assert len(data) == 3 and not data.has_labels
    with pytest.raises(SceneDataError, match="take 001_4DOR.*relation_labels nor a relationships_train.json"):
        OR4DDataset(or4d, "train")
    dummy = or4d / "dummy.json"
    dummy.write_text(json.dumps({"scans": [{"take_idx": 1, "scan": "000000"}]}))
    with pytest.raises(SceneDataError, match=r"dummy\.json has no labels for 001_4DOR"):
        OR4DDataset(or4d, "train", labels=dummy)


def test_wrong_folders_say_what_was_expected(or4d: Path, tmp_path: Path) -> None:
    with pytest.raises(SceneDataError, match="holds no export_holistic_take1_processed.*4D-OR_data does"):
        OR4DDataset(tmp_path)
    with pytest.raises(SceneDataError, match=f"it is one of them, give {or4d}"):
        OR4DDataset(or4d / "export_holistic_take1_processed")
    with pytest.raises(SceneDataError, match="nowhere holds no export_holistic"):
        OR4DDataset(tmp_path / "nowhere")
    shutil.rmtree(or4d / "export_holistic_take4_processed")
    with pytest.raises(SceneDataError, match="take 004_4DOR: .*export_holistic_take4_processed does not exist"):
        OR4DDataset(or4d, "val")
    assert OR4DDataset(or4d, "val", takes=[8]).takes == ("008_4DOR",)
    shutil.rmtree(or4d / "export_holistic_take8_processed" / "colorimage")
    with pytest.raises(SceneDataError, match="take 008_4DOR: .*colorimage holds no images"):
        OR4DDataset(or4d, "val", takes=[8])
    (or4d / "export_holistic_take2_processed" / "timestamp_to_pcd_and_frames_list.json").unlink()
    with pytest.raises(SceneDataError, match="take 002_4DOR: .*timestamp_to_pcd_and_frames_list.json does not exist"):
        OR4DDataset(or4d, "test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "tets"}, "split='tets': did you mean 'test'"),
        ({"label_style": "mm"}, "label_style='mm'"),
        ({"missing_views": "white"}, "missing_views='white'"),
        ({"views": (2, 7)}, "cameras 1 to 6"),
        ({"views": (2, 2)}, "each once"),
        ({"views": ()}, "at least one view"),
        ({"takes": [2]}, "002_4DOR.*not in the train split"),
        ({"takes": ["two"]}, "take 'two' is not of 4D-OR"),
    ],
)
def test_wrong_options_name_the_allowed_ones(or4d: Path, arguments: dict, message: str) -> None:
    with pytest.raises(SceneGraphError, match=message):
        OR4DDataset(or4d, **arguments)


def test_a_frame_beyond_the_list_is_reported_with_take_and_length(builders, or4d: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    write_mmor_relations(labels, [LabeledFrame("002_4DOR", builders.FIRST_IMAGE + 2, SceneGraph())])
    with pytest.raises(SceneDataError, match="take 002_4DOR has no frame 4002: .* lists 3 frames.*number of an image"):
        OR4DDataset(or4d, "test", labels=labels)


def test_damaged_lists_and_labels_are_reported_by_file(or4d: Path) -> None:
    folder = or4d / "export_holistic_take2_processed"
    (folder / "relation_labels" / "000001.json").write_text("{")
    with pytest.raises(SceneDataError, match=r"take2_processed/relation_labels/000001\.json.*damaged"):
        OR4DDataset(or4d, "test")
    (folder / "relation_labels" / "000001.json").rename(folder / "relation_labels" / "first.json")
    (folder / "relation_labels" / "first.json").write_text('{"rel_annotations": []}')
    with pytest.raises(SceneDataError, match=r"first\.json: label files are named after frames"):
        OR4DDataset(or4d, "test")
    (folder / "relation_labels" / "first.json").unlink()
    (folder / "timestamp_to_pcd_and_frames_list.json").write_text('[["1", {"color_1": "0"}], 5, 6]')
    with pytest.raises(SceneDataError, match=r"frames_list\.json, entry 2: 6 is not"):
        OR4DDataset(or4d, "test", views=(1,))
    (folder / "timestamp_to_pcd_and_frames_list.json").write_text("{}")
    with pytest.raises(SceneDataError, match=r"frames_list\.json is no list"):
        OR4DDataset(or4d, "test")


def test_a_missing_view_skips_the_frame_or_is_black(builders, or4d: Path, caplog) -> None:
    images = or4d / "export_holistic_take2_processed" / "colorimage"
    (images / f"camera03_colorimage-{builders.FIRST_IMAGE + 13:06d}.jpg").unlink()
    with caplog.at_level(logging.WARNING, logger="scene_graph.datasets"):
        data = OR4DDataset(or4d, "test")
    assert data.skipped == {"002_4DOR_000001": "camera03"} and len(data) == 5
    assert len(caplog.records) == 1 and "002_4DOR_000001 without camera03" in caplog.text
    black = OR4DDataset(or4d, "test", missing_views="black").find("002_4DOR_000001")
    assert [gray(image) for image in black.images()] == [21, 11, 0, 51]
    assert black.image("camera03").shape == black.image("camera01").shape and black.meta["missing_views"] == [
        "camera03"
    ]
    only = OR4DDataset(or4d, "test", views=(3,), missing_views="black")
    assert only.skipped == {"002_4DOR_000001": "camera03"}  # nothing but black would be no sample
    assert not OR4DDataset(or4d, "test", views=(2, 1)).skipped


def test_a_split_without_any_image_is_an_error(or4d: Path) -> None:
    for path in (or4d / "export_holistic_take2_processed" / "colorimage").glob("camera02*"):
        path.unlink()
    with pytest.raises(SceneDataError, match="gives no samples: all lack images"):
        OR4DDataset(or4d, "test", takes=[2])


def test_a_corrupted_jpeg_is_reported_by_file_and_sample(builders, or4d: Path) -> None:
    name = f"camera02_colorimage-{builders.FIRST_IMAGE + 12:06d}.jpg"
    path = or4d / "export_holistic_take2_processed" / "colorimage" / name
    path.write_bytes(path.read_bytes()[:200])
    data = OR4DDataset(or4d, "test")
    assert gray(data.find("002_4DOR_000000").image()) == 20
    with pytest.raises(SceneDataError, match=f"002_4DOR_000001, view camera02: .*{name}.*damaged"):
        data.find("002_4DOR_000001").images()


def test_unknown_labels_are_counted_and_shown_or_an_error(builders, or4d: Path, caplog) -> None:
    rows = [["human_0", "Welding", "Patient"], ["human_0", "Drilling", "Patient"]]
    builders.write_or4d_take(or4d, 2, [rows, [], []], HUMANS)
    with caplog.at_level(logging.WARNING, logger="scene_graph.datasets"):
        data = OR4DDataset(or4d, "test", takes=[2])
    assert data.unknown == Counter(Welding=1) and "Welding (1)" in caplog.text
    assert DRILL in data[0].graph
    with pytest.raises(SceneDataError, match=r"relation_labels/000000\.json.*'Welding'"):
        OR4DDataset(or4d, "test", takes=[2], strict_vocab=True)


def test_two_predicates_of_a_pair_are_kept_and_warned_about(builders, or4d: Path, caplog) -> None:
    rows = [["human_0", "Sawing", "Patient"], ["human_0", "Drilling", "Patient"]]
    builders.write_or4d_take(or4d, 2, [rows, [], []], HUMANS)
    with caplog.at_level(logging.WARNING, logger="scene_graph.datasets"):
        data = OR4DDataset(or4d, "test", takes=[2])
    assert set(data[0].graph.conflicts()) == {("head surgeon", "patient")} and "002_4DOR_000000" in caplog.text


def test_takes_of_a_simulation_are_split_by_its_own_file(builders, tmp_path: Path) -> None:
    for number in (1, 2, 12):
        builders.write_or4d_take(tmp_path, number, ROWS, HUMANS)
    splits = {"train": [1, 12], "validation": [], "test": [2]}
    (tmp_path / "simulator.json").write_text(json.dumps({"splits": splits}))
    assert OR4DDataset(tmp_path).takes == ("001_4DOR", "012_4DOR")
    (tmp_path / "simulator.json").write_text(json.dumps({"splits": {"train": [1]}}))
    with pytest.raises(SceneDataError, match=r"simulator\.json names no takes for the splits validation, test"):
        OR4DDataset(tmp_path)


def test_samples_that_do_not_exist_are_named(or4d: Path) -> None:
    with pytest.raises(SceneDataError, match="no sample '002_4DOR_000009': did you mean '002_4DOR_00000"):
        OR4DDataset(or4d, "test").find("002_4DOR_000009")


# ------------------------------------------------------------------------------------------------ MM-OR


def test_mmor_views_come_from_azure_or_from_the_simulation_station(mmor: Path) -> None:
    data = MMORDataset(mmor, "val")
    assert data.takes == ("002_PKA_MMOR", "007_TKA_MMOR", "009_TKA_MMOR")
    sample = data.find("002_PKA_MMOR_000002")
    assert sample.view_names == ("azure1", "azure4", "azure5", "azure2", "azure3")
    assert [gray(image) for image in sample.images()] == [12, 42, 52, 22, 32]
    fallback = data.find("009_TKA_MMOR_000001")
    assert fallback.view_names == ("simstation2", "simstation0", "simstation3")
    assert [gray(image) for image in fallback.images()] == [121, 101, 131]


def test_every_third_label_of_the_dense_take_is_kept(mmor: Path) -> None:
    data = MMORDataset(mmor, "val", takes=["007_TKA"])
    assert [sample.frame for sample in data] == [0, 3]


def test_mmor_labels_are_completed_without_an_instrument(mmor: Path) -> None:
    first, second, third = MMORDataset(mmor, "val", takes=["002_PKA_MMOR"]).graphs()
    assert first == SceneGraph(
        [
            DRILL,
            Triplet("patient", "lyingOn", "operating table"),
            Triplet("head surgeon", "closeTo", "operating table"),
        ]
    )
    assert second == SceneGraph() and third == SceneGraph([Triplet("mps", "calibrating", "tracker")])


def test_takes_that_share_a_folder_keep_their_own_lists_and_labels(builders, mmor: Path) -> None:
    data = MMORDataset(mmor, "train", takes=["015_PKA", "016_PKA"])
    assert Counter(sample.take for sample in data) == {"015_PKA_MMOR": 3, "016_PKA_MMOR": 2}
    assert DRILL in data.find("015_PKA_MMOR_000000").graph and not data.find("016_PKA_MMOR_000000").graph
    assert "camera01_colorimage-007300.jpg" in str(data.find("016_PKA_MMOR_000000").views[0])
    # A list without a name in a shared folder could be anybody's.
    folder = mmor / "015-018_PKA"
    folder.joinpath("timestamp_to_pcd_and_frames_list_016_PKA.json").rename(
        folder / "timestamp_to_pcd_and_frames_list.json"
    )
    with pytest.raises(SceneDataError, match="take 016_PKA_MMOR: .*frames_list_016_PKA.json does not exist"):
        MMORDataset(mmor, "train", takes=["016_PKA"])


def test_ten_views_of_mmor(mmor: Path) -> None:
    views = (1, 4, 5, 2, 3, "simstation1", "simstation0", "simstation2", "simstation3", "trackercam")
    sample = MMORDataset(mmor, "val", views=views, takes=["002_PKA"])[0]
    assert len(sample.images()) == 10 and gray(sample.image("simstation1")) == 110
    fallback = MMORDataset(mmor, "val", views=views, takes=["009_TKA"])[0]
    assert sorted(fallback.view_names) == ["simstation0", "simstation1", "simstation2", "simstation3", "trackercam"]
    with pytest.raises(SceneGraphError, match="views='simstation4': did you mean"):
        MMORDataset(mmor, "val", views=(1, "simstation4"))
    with pytest.raises(SceneGraphError, match="cameras 1 to 5"):
        MMORDataset(mmor, "val", views=(6,))


def test_missing_room_cameras_of_other_takes_are_warned_about(mmor: Path, caplog) -> None:
    shutil.rmtree(mmor / "002_PKA" / "colorimage")
    with caplog.at_level(logging.WARNING, logger="scene_graph.datasets"):
        MMORDataset(mmor, "val")
    assert "002_PKA_MMOR has no images of the room cameras" in caplog.text and "009_TKA" not in caplog.text
    shutil.rmtree(mmor / "002_PKA" / "simstation")
    with pytest.raises(SceneDataError, match="take 002_PKA_MMOR: neither .*colorimage nor .*simstation holds images"):
        MMORDataset(mmor, "val")


def test_a_file_with_both_data_sets_gives_one_or_both(builders, or4d: Path, mmor: Path) -> None:
    frames = [LabeledFrame("002_PKA_MMOR", 1, SceneGraph([DRILL])), LabeledFrame("004_4DOR", 2, SceneGraph([NEAR]))]
    (mmor / "data").mkdir()
    write_mmor_relations(mmor / "data" / "relationships_validation.json", frames)
    alone, both = MMORDataset(mmor, "val"), MMORDataset(mmor, "val", or4d_root=or4d)
    assert alone.takes == ("002_PKA_MMOR",) and both.takes == ("002_PKA_MMOR", "004_4DOR")
    assert both[0].graph == SceneGraph([DRILL]) and both[1].graph == SceneGraph([NEAR])
    assert [gray(image) for image in both[1].images()] == [22, 12, 32, 52]
    write_or4d_relations(mmor / "raw.json", frames[1:])
    with pytest.raises(SceneDataError, match=r"raw\.json is a label file of 4D-OR"):
        MMORDataset(mmor, "val", labels=mmor / "raw.json")


def test_texts_of_mmor_are_read_from_their_folders(mmor: Path) -> None:
    speech = mmor / "take_transcripts_per_timepoint" / "002_PKA" / "33.json"
    screen = mmor / "screen_summaries" / "002_PKA" / "004101.json"
    for path, content in (
        (speech, {"text": " saw please "}),
        (screen, {"0": {"type": "page", "template_name": "bone"}}),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    data = MMORDataset(mmor, "val", takes=["002_PKA"], texts=True)
    assert [sample.meta["texts"] for sample in data] == [{}, {"speech": "saw please", "screen": "page: bone"}, {}]
    speech.write_text("[]")
    with pytest.raises(SceneDataError, match=r"002_PKA/33\.json is no JSON object"):
        MMORDataset(mmor, "val", takes=["002_PKA"], texts=True)


def test_wrong_folders_of_mmor_say_what_was_expected(or4d: Path, mmor: Path) -> None:
    with pytest.raises(SceneDataError, match="holds no take of MM-OR, such as 001_PKA"):
        MMORDataset(or4d)
    with pytest.raises(SceneDataError, match="take 001_PKA_MMOR: .*001_PKA does not exist"):
        MMORDataset(mmor, "train")
    with pytest.raises(SceneGraphError, match="099_PKA"):
        MMORDataset(mmor, "val", takes=["099_PKA"])
    shutil.rmtree(mmor / "002_PKA" / "relation_labels")
    with pytest.raises(SceneDataError, match="take 002_PKA_MMOR: there is neither .*relation_labels nor"):
        MMORDataset(mmor, "val")


# ------------------------------------------------------------------------------------------------ folders, videos


def test_a_folder_of_images_is_a_data_set(builders, tmp_path: Path) -> None:
    for name, value in (("a/10.jpg", 10), ("a/9.png", 9), ("b/1.jpg", 1), ("top.jpg", 99)):
        builders.write_image(tmp_path / name, value)
    write_graphs(tmp_path / "labels.json", {"a/9": SceneGraph([DRILL]), "b/1": SceneGraph()})
    data = SceneFolder(tmp_path, seconds_per_frame=0.5)
    assert [(s.id, s.take, s.frame, s.seconds) for s in data] == [
        ("a/9", "a", 0, 0.0),
        ("a/10", "a", 1, 0.5),
        ("b/1", "b", 0, 0.0),
        ("top", tmp_path.name, 0, 0.0),
    ]
    assert [gray(sample.image()) for sample in data] == [9, 10, 1, 99]
    assert data[0].graph == SceneGraph([DRILL]) and data[1].graph is None and data[2].graph == SceneGraph()
    with pytest.raises(SceneDataError, match="no labels for a/10"):
        data.graphs()


def test_the_images_of_a_folder_can_be_views(builders, tmp_path: Path) -> None:
    for name in ("t/0/left.jpg", "t/0/right.jpg", "t/1/left.jpg"):
        builders.write_image(tmp_path / name, 50)
    data = SceneFolder(tmp_path, folders_are_samples=True)
    assert [(s.id, s.take, s.view_names) for s in data] == [
        ("t/0", "t", ("left.jpg", "right.jpg")),
        ("t/1", "t", ("left.jpg",)),
    ]
    builders.write_image(tmp_path / "stray.jpg", 50)
    with pytest.raises(SceneDataError, match=r"stray\.jpg is in no sub-folder"):
        SceneFolder(tmp_path, folders_are_samples=True)


def test_wrong_image_folders_are_reported(builders, tmp_path: Path) -> None:
    with pytest.raises(SceneDataError, match="nowhere is not a folder"):
        SceneFolder(tmp_path / "nowhere")
    with pytest.raises(SceneDataError, match="holds no images"):
        SceneFolder(tmp_path)
    builders.write_image(tmp_path / "one.jpg", 1)
    write_graphs(tmp_path / "labels.json", {"onee": SceneGraph()})
    with pytest.raises(SceneDataError, match=r"labels\.json labels 'onee'.*did you mean 'one'"):
        SceneFolder(tmp_path)
    (tmp_path / "labels.json").unlink()
    with pytest.raises(SceneDataError, match=r"missing\.json does not exist"):
        SceneFolder(tmp_path, labels=tmp_path / "missing.json")
    builders.write_image(tmp_path / "one.png", 1)
    with pytest.raises(SceneDataError, match=r"one\.jpg and one\.png have the same name"):
        SceneFolder(tmp_path)


def write_video(path: Path, milliseconds: list[int]) -> None:
    """A video whose frame k, shown at the k-th time, is the gray 10 k."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1000)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate(milliseconds):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 10 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def test_a_video_of_variable_rate_is_sampled_by_time(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    times = [0, 100, 200, 300, 900, 1700, 2000, 2050, 3100]
    write_video(path, times)
    data = VideoFrames(path, fps=2)
    expected = [max(k for k, time in enumerate(times) if time <= 500 * number) for number in range(7)]
    assert data.frames.tolist() == expected == [0, 3, 4, 4, 6, 7, 7]
    assert [sample.seconds for sample in data] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert [abs(gray(sample.image()) - 10 * frame) <= 2 for sample, frame in zip(data, expected)] == [True] * 7
    assert data[-1].id == "clip_000007" and data[-1].graph is None and data.takes == ("clip",)
    assert [sample.frame for sample in data[1:3]] == [3, 4]
    with pytest.raises(IndexError, match=r"clip\.mp4: sample 7 does not exist"):
        data[7]


def test_wrong_videos_are_reported_by_file(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with pytest.raises(VideoDecodeError, match=r"clip\.mp4"):
        VideoFrames(path)
    path.write_bytes(b"nothing")
    with pytest.raises(VideoDecodeError, match=r"clip\.mp4"):
        VideoFrames(path)
    with pytest.raises(SceneGraphError, match="fps=0"):
        VideoFrames(path, fps=0)
