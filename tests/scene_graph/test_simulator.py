from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scene_graph.datasets import OR4DDataset
from scene_graph.formats import complete_relations, forward_relations, mirrored_relations
from scene_graph.schema import SceneDataError, SceneGraph, Triplet, Vocabulary, tail_split
from scene_graph.simulator import Person, Renderer, SimulatedTake, SimulatorConfig, make_take, plan_study, simulate
from scene_graph.simulator.world import ACTIONS, CLOSE_DISTANCE, PHASE_SECONDS, TABLE_HALF, close_pairs, split_takes
from vidgen.runtime.errors import ConfigError

# Of the validation and test takes of 4D-OR, per frame: share of frames with the predicate, triplets with it.
FRAMES = 2710
STATISTICS = {
    "closeTo": (2489, 14020),
    "lyingOn": (2369, 2369),
    "holding": (1240, 1811),
    "touching": (781, 924),
    "preparing": (510, 812),
    "assisting": (378, 380),
    "manipulating": (125, 204),
    "cleaning": (163, 206),
    "hammering": (98, 98),
    "sawing": (85, 85),
    "cutting": (103, 103),
    "suturing": (46, 46),
    "drilling": (58, 58),
    "cementing": (47, 47),
}
STAFF = {0: 200, 1: 339, 2: 575, 3: 1415, 4: 174, 5: 7}


@pytest.fixture(scope="module")
def takes() -> list[SimulatedTake]:
    config = SimulatorConfig(takes=10)
    study = plan_study(config)
    return [make_take(config, study, number) for number in range(1, 11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("simulated"), SMALL)


SMALL = SimulatorConfig(takes=4, frames_per_take=24, views=(2, 1), size=32, looks_per_action=1, seed=3)


# ---------------------------------------------------------------------------------------------- labels


def test_label_statistics_are_those_of_the_real_data(takes: list[SimulatedTake]) -> None:
    graphs = [state.graph for take in takes for state in take.states]
    with_predicate = Counter(predicate for graph in graphs for predicate in graph.predicates)
    triplets = Counter(triplet.predicate for graph in graphs for triplet in graph)
    for predicate, (frames, instances) in STATISTICS.items():
        # Rare actions are drawn a few times per take, so they scatter by a fifth.
        assert with_predicate[predicate] / len(graphs) == pytest.approx(frames / FRAMES, rel=0.25), predicate
        assert triplets[predicate] / len(graphs) == pytest.approx(instances / FRAMES, rel=0.25), predicate
    assert np.mean([len(graph) for graph in graphs]) == pytest.approx(7.8, abs=0.5)
    assert 45 <= len({triplet for graph in graphs for triplet in graph}) <= 60  # 52 and 53
    staff = Counter(len(state.people) for take in takes for state in take.states)
    for number, frames in STAFF.items():
        assert staff[number] / len(graphs) == pytest.approx(frames / FRAMES, abs=0.06)


def test_the_tail_is_the_tail_of_4d_or(takes: list[SimulatedTake]) -> None:
    split = tail_split([state.graph for take in takes for state in take.states], Vocabulary.or4d())
    assert set(split.tail) == {*ACTIONS, "manipulating"}


def test_frames_at_one_second_have_episodes_of_the_measured_length() -> None:
    config = SimulatorConfig(takes=4, frames_per_take=673, looks_per_action=1)
    study = plan_study(config)
    lengths = defaultdict(list)
    for number in range(1, 4):
        take = make_take(config, study, number)
        step = take.states[1].seconds - take.states[0].seconds
        previous: frozenset[Triplet] = frozenset()
        for state in take.states:
            for triplet in state.graph.triplets:
                if triplet not in previous:
                    lengths[triplet.predicate].append(0.0)
                lengths[triplet.predicate][-1] += step
            previous = state.graph.triplets
    for predicate, seconds in {
        "cutting": 21,
        "drilling": 12,
        "suturing": 12,
        "hammering": 9,
        "assisting": 2.4,
    }.items():
        assert np.mean(lengths[predicate]) == pytest.approx(seconds, rel=0.5), predicate


def test_phases_follow_each_other_with_their_mean_durations(takes: list[SimulatedTake]) -> None:
    total = Counter()
    for take in takes:
        phases = [state.phase for state in take.states]
        assert list(dict.fromkeys(phases)) == list(PHASE_SECONDS)
        assert phases == sorted(phases, key=list(PHASE_SECONDS).index)
        total.update(phases)
    for phase, seconds in PHASE_SECONDS.items():
        share = seconds / sum(PHASE_SECONDS.values())
        assert total[phase] / sum(total.values()) == pytest.approx(share, rel=0.2)


def test_graphs_are_complete_without_conflicts_and_survive_both_directions(takes: list[SimulatedTake]) -> None:
    for take in takes[:4]:
        for state in take.states:
            assert not state.graph.conflicts()
            assert complete_relations(state.graph) == state.graph
            assert forward_relations(mirrored_relations(state.graph)) == state.graph


def test_relations_are_facts_of_the_geometry(takes: list[SimulatedTake]) -> None:
    for state in takes[0].states:
        people = {person.role: person for person in state.people}
        for triplet in state.graph:
            person = people.get(triplet.subject)
            if triplet.predicate == "holding":
                assert person.tool is not None
                assert np.linalg.norm(person.hands[1] - person.tool.tip) < 0.4
            if triplet.predicate in ACTIONS:
                assert person.tool.kind == triplet.predicate and person.tool.is_applied
                assert np.linalg.norm(person.tool.tip[:2] - state.table - (0.42, 0.0)) < 0.15
            if triplet.predicate == "lyingOn":
                assert state.table is not None
        holders = {triplet.subject for triplet in state.graph if triplet.predicate == "holding"}
        assert {role for role, person in people.items() if person.tool is not None} == holders
        related = {frozenset((t.subject, t.object)) for t in state.graph}
        for role, person in people.items():
            if state.table is None or role == "visitor":
                continue
            # Naive: the nearest of many points on the table.
            grid = np.stack(np.meshgrid(np.linspace(-1, 1, 81), np.linspace(-1, 1, 25)), axis=-1).reshape(-1, 2)
            distance = np.linalg.norm(state.table + grid * TABLE_HALF - person.position, axis=1).min()
            if abs(distance - CLOSE_DISTANCE) > 0.02:
                assert (frozenset((role, "operating table")) in related) == (distance < CLOSE_DISTANCE)


def test_closeness_is_measured_between_outlines() -> None:
    people = {"circulator": np.array([0.0, 0.0]), "head surgeon": np.array([0.0, 0.89])}
    things = {"instrument table": (1.4, 0.0, 0.55, 0.2), "secondary table": (3.0, 0.0, 0.1, 0.1)}
    # 0.89 between people, 0.85 to the edge of the near table; corner of the head surgeon: hypot(0.85, 0.69) = 1.09;
    # between the tables 3.0 - 1.4 - 0.55 - 0.1 = 0.95.
    assert close_pairs(people, things) == {("circulator", "head surgeon"), ("circulator", "instrument table")}


# ---------------------------------------------------------------------------------------------- looks and splits


@pytest.mark.parametrize(("takes", "sizes"), [(10, (6, 2, 2)), (36, (28, 3, 5)), (4, (2, 1, 1))])
def test_takes_are_split_as_asked(takes: int, sizes: tuple[int, int, int]) -> None:
    splits = split_takes(takes)
    assert tuple(len(numbers) for numbers in splits.values()) == sizes
    assert sorted(number for numbers in splits.values() for number in numbers) == list(range(1, takes + 1))


def test_every_look_is_seen_in_training_but_those_that_must_not_be() -> None:
    config = SimulatorConfig(takes=36, looks_unseen=0.2, seed=5)
    study = plan_study(config)
    train = Counter((look.action, look.index) for take in study.splits["train"] for look in study.looks[take].values())
    assert set(train) == {(action, index) for action in ACTIONS for index in range(3)}
    assert min(train.values()) >= 2
    test = [look for take in study.splits["test"] for look in study.looks[take].values()]
    assert sum(look.is_unseen for look in test) == round(0.2 * len(test))
    assert all(look.is_unseen == ((look.action, look.index) not in train) for look in test)
    assert not any(look.is_unseen for take in study.splits["validation"] for look in study.looks[take].values())


def test_neither_color_nor_body_names_an_action() -> None:
    study = plan_study(SimulatorConfig(takes=36))
    looks = {look for take in study.looks.values() for look in take.values()}
    pairs = {(look.action, look.index): (look.body, look.hue) for look in looks}
    assert len(set(pairs.values())) == len(pairs)  # both together are one look's
    for position in (0, 1):
        actions = defaultdict(set)
        for (action, _), pair in pairs.items():
            actions[pair[position]].add(action)
        assert np.mean([len(names) for names in actions.values()]) > 2


def test_each_training_take_shows_each_action(takes: list[SimulatedTake]) -> None:
    for take in takes:
        assert set(ACTIONS) <= {predicate for state in take.states for predicate in state.graph.predicates}


# ---------------------------------------------------------------------------------------------- pictures


def find(take: SimulatedTake, predicate: str) -> int:
    return next(state.frame for state in take.states if predicate in state.graph.predicates)


def test_views_differ_and_change_with_the_scene(takes: list[SimulatedTake]) -> None:
    renderer = Renderer(takes[0], views=(2, 1, 3, 5), size=64)
    images = renderer.render(takes[0].states[find(takes[0], "drilling")])
    assert images.shape == (4, 64, 64, 3) and images.dtype == np.uint8
    for index in range(4):
        assert images[index].std() > 15
        for other in range(index):
            assert np.abs(images[index].astype(int) - images[other]).mean() > 10


def using(person: Person, kind: str | None) -> Person:
    """The person with another tip on the tool that is at the knee, or without it."""
    if person.tool is None or not person.tool.is_applied:
        return person
    tool = None if kind is None else dataclasses.replace(person.tool, kind=kind)
    return dataclasses.replace(person, tool=tool)


@pytest.mark.parametrize("action", ACTIONS)
def test_the_close_view_shows_which_tool_is_used(takes: list[SimulatedTake], action: str) -> None:
    """The picture changes where the tool is, and differs between the tools of two actions in the same hand."""
    changes = []
    for take in takes[:4]:
        state, swapped = take.states[find(take, action)], "drilling" if action != "drilling" else "sawing"
        renderer = Renderer(take, views=(2,), size=64)
        pictures = []
        for kind in (action, swapped, None):
            people = [using(person, kind) for person in state.people]
            pictures.append(renderer.render(dataclasses.replace(state, people=tuple(people)))[0].astype(int))
        shown, other, bare = pictures
        assert (np.abs(shown - other).max(axis=2) > 40).sum() >= 5
        changes.append((np.abs(shown - bare).max(axis=2) > 40).sum())
    assert np.median(changes) > 60


def test_people_hide_what_is_behind_them_in_one_view_and_not_in_another(takes: list[SimulatedTake]) -> None:
    """Of the frames with an action, the tool is hidden from some cameras in some and from all in hardly any."""
    visible = []
    for take in takes[:4]:
        renderer = Renderer(take, views=(2, 1, 3, 5), size=64)
        for state in take.states[::4]:
            if any(person.tool is not None and person.tool.is_applied for person in state.people):
                people = tuple(using(person, None) for person in state.people)
                shown = renderer.render(state).astype(int)
                without = renderer.render(dataclasses.replace(state, people=people)).astype(int)
                visible.append((np.abs(shown - without).max(axis=3) > 40).sum(axis=(1, 2)))
    seen = np.array(visible) > 4
    assert 0.85 < seen[:, 0].mean() <= 1.0
    assert 0.05 < (~seen[:, 1:]).mean() < 0.9
    assert seen.any(axis=1).mean() > 0.95


def test_the_nearer_covers_the_farther(takes: list[SimulatedTake]) -> None:
    """A head that is moved between camera and knee hides the knee; one behind the table does not."""
    take = takes[0]
    state = take.states[find(take, "suturing")]
    surgeon = next(person for person in state.people if person.role == "head surgeon")
    renderer = Renderer(take, views=(2,), size=64)
    middle = slice(24, 40)

    def knee_with(position: np.ndarray) -> np.ndarray:
        person = dataclasses.replace(surgeon, position=position, tool=None, hands=np.array([[*position, 1.0]] * 2))
        return renderer.render(dataclasses.replace(state, people=(person,)))[0, middle, middle].astype(int)

    empty = renderer.render(dataclasses.replace(state, people=()))[0, middle, middle].astype(int)
    before, behind = (knee_with(state.table + np.array([along, 0.0])) for along in (0.55, -1.4))
    assert (np.abs(before - empty).max(axis=2) > 15).mean() > 0.5
    assert (np.abs(behind - empty).max(axis=2) > 15).mean() < 0.05


# ---------------------------------------------------------------------------------------------- on disk


def read_independently(folder: Path, take: int) -> dict[int, set[tuple[str, str, str]]]:
    """Subject, predicate, object of each frame, from the files of single frames, with roles in place of humans."""
    frames = {}
    place = folder / f"export_holistic_take{take}_processed"
    listing = json.loads((place / "timestamp_to_pcd_and_frames_list.json").read_text())
    for frame in range(len(listing)):
        content = json.loads((place / "relation_labels" / f"{frame:06d}.json").read_text())
        roles = content["human_name_annotations"]
        triplets = set()
        for subject, predicate, object, *_ in content["rel_annotations"]:
            triplets.add((roles.get(subject, subject), predicate, roles.get(object, object)))
        frames[frame] = triplets
    return frames


def read_aggregated(path: Path) -> dict[tuple[int, int], set[tuple[str, str, str]]]:
    frames = {}
    for scan in json.loads(path.read_text())["scans"]:
        names = {int(k): scan["human_idx_to_name"].get(v, v) for k, v in scan["objects"].items()}
        triplets = {(names[s], predicate, names[o]) for s, o, _, predicate in scan["relationships"]}
        frames[scan["take_idx"], int(scan["scan"])] = triplets
    return frames


def spoken(graph: SceneGraph) -> set[tuple[str, str, str]]:
    names = {"patient": "Patient", "circulator": "circulating-nurse", "manipulating": "Operating"}
    names |= {"head surgeon": "head-surgeon", "assistant surgeon": "assistant-surgeon"}

    def name(word: str) -> str:
        return names.get(word, word.replace(" ", "_"))

    return {(name(s), names.get(p, p[0].upper() + p[1:]), name(o)) for s, p, o in (t.spo() for t in graph)}


def test_files_say_what_was_simulated(folder: Path) -> None:
    study = plan_study(SMALL)
    for split, numbers in study.splits.items():
        aggregated = read_aggregated(folder / "data" / f"relationships_{split}.json")
        assert len(aggregated) == len(numbers) * SMALL.frames_per_take
        for number in numbers:
            single = read_independently(folder, number)
            for state in make_take(SMALL, study, number).states:
                truth = spoken(state.graph)
                assert single[state.frame] == truth
                pairs = {(s, o) for s, _, o in truth}
                mirrored = truth | {(o, "CloseTo", s) for s, o in pairs if (o, s) not in pairs}
                assert aggregated[number, state.frame] == mirrored


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_the_reader_of_4d_or_reads_it(folder: Path, split: str) -> None:
    data = OR4DDataset(folder, split=split, views=(2, 1))
    study = plan_study(SMALL)
    assert data.takes == tuple(f"{number:03d}_4DOR" for number in study.splits[split])
    assert not data.unknown and not data.skipped
    for number in study.splits[split]:
        take = make_take(SMALL, study, number)
        renderer = Renderer(take, (2, 1), SMALL.size, SMALL.seed)
        for state in take.states[::5]:
            sample = data.find(f"{number:03d}_4DOR_{state.frame:06d}")
            assert sample.graph == state.graph
            pictures = renderer.render(state).astype(int)
            for view in range(2):
                assert np.abs(sample.image(view).astype(int) - pictures[view]).mean() < 6  # JPEG
    mmor = OR4DDataset(folder, split, (2, 1), labels=folder / "data" / f"relationships_{split}_mmor.json")
    assert [sample.graph for sample in mmor] == [sample.graph for sample in data]


def test_image_numbers_are_not_frame_numbers(folder: Path) -> None:
    place = folder / "export_holistic_take1_processed"
    listing = json.loads((place / "timestamp_to_pcd_and_frames_list.json").read_text())
    numbers = np.array([[int(entry["color_2"]), int(entry["color_1"])] for _, entry in listing])
    assert numbers.min() >= 5000 and (np.diff(numbers, axis=0) > 0).all()
    assert len(set((numbers - np.arange(len(numbers))[:, None]).ravel().tolist())) > 2  # no constant shift
    times = np.array([int(time) for time, _ in listing])
    assert (np.diff(times) > 0).all()
    with Image.open(place / "colorimage" / f"camera02_colorimage-{numbers[0, 0]:06d}.jpg") as image:
        assert image.size == (SMALL.size, SMALL.size)
    phases = json.loads((place / "phase_to_frames_1.json").read_text())
    covered = [frame for first, last in phases.values() for frame in range(first, last + 1)]
    assert covered == list(range(SMALL.frames_per_take))


def test_the_calibration_projects_points_to_where_they_are_drawn(folder: Path) -> None:
    study = plan_study(SMALL)
    renderer = Renderer(make_take(SMALL, study, 1), (2, 1), SMALL.size)
    for index, view in enumerate((2, 1)):
        path = folder / "export_holistic_take1_processed" / f"camera{view:02d}.json"
        camera = json.loads(path.read_text())["value0"]
        matrix = camera["color_parameters"]["intrinsics_matrix"]
        x, y, z, w = (camera["camera_pose"]["rotation"][name] for name in "xyzw")
        rotation = np.array(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
            ]
        )
        position = np.array([camera["camera_pose"]["translation"][f"m{row}0"] for row in range(3)])
        point = np.array([3.3, 2.4, 1.1])
        local = rotation.T @ (point - position)
        pixel = [
            local[0] / local[2] * matrix["m00"] + matrix["m20"],
            local[1] / local[2] * matrix["m11"] + matrix["m21"],
        ]
        drawn, _ = renderer._project(point[None])
        assert pixel == pytest.approx((drawn[index, 0] / 4).tolist(), abs=1e-6)


def test_simulator_file_names_splits_and_unseen_looks(folder: Path) -> None:
    content = json.loads((folder / "simulator.json").read_text())
    study = plan_study(SMALL)
    assert content["splits"] == {split: list(numbers) for split, numbers in study.splits.items()}
    unseen = {(take, a) for take, looks in content["looks"].items() for a, look in looks.items() if look["is_unseen"]}
    test = {f"{number:03d}_4DOR" for number in study.splits["test"]}
    assert len(unseen) == 1 and {take for take, _ in unseen} <= test  # a fifth of 7


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_call_is_continued_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import scene_graph.simulator.writer as writer

    write, calls = writer._write_images, []

    def fail_at_third(*args) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(writer, "_write_images", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path, SMALL)
    assert not (tmp_path / "simulator.json").exists()
    assert sorted(path.name for path in tmp_path.glob("*export*")) == [
        "export_holistic_take1_processed",
        "export_holistic_take2_processed",
    ]
    simulate(tmp_path, SMALL)
    assert len(calls) == 5  # takes 1 and 2 were kept
    assert contents(tmp_path) == contents(folder)
    simulate(tmp_path, SMALL)
    assert len(calls) == 5


@pytest.mark.slow
def test_processes_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert contents(simulate(tmp_path, SMALL, workers=2)) == contents(folder)


def test_another_seed_is_another_data_set(takes: list[SimulatedTake]) -> None:
    config = SimulatorConfig(takes=10, seed=1)
    other = make_take(config, plan_study(config), 1)
    assert [state.graph for state in other.states] != [state.graph for state in takes[0].states]


def test_a_folder_with_other_settings_or_real_data_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SceneDataError, match="other settings"):
        simulate(folder, dataclasses.replace(SMALL, seed=4))
    (tmp_path / "export_holistic_take1_processed").mkdir()
    with pytest.raises(SceneDataError, match="not simulated"):
        simulate(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"takes": 2}, "takes=2"),
        ({"takes": 6}, "looks_per_action up to 2"),
        ({"views": (2, 7)}, "cameras 1 to 6"),
        ({"views": ()}, "at least one"),
        ({"size": 8}, "size=8"),
        ({"looks_per_action": 9}, "looks_per_action=9"),
        ({"looks_unseen": 1.5}, "looks_unseen=1.5"),
        ({"frames_per_take": 4}, "frames_per_take=4"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulatorConfig(**fields)
