from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from vidgen.worlds import (
    BIOMES,
    TIMES,
    TRAVELLERS,
    WEATHERS,
    CameraMove,
    LandscapeScene,
    LandscapeWorld,
    caption,
    parse_caption,
    prompt_plan,
)
from vidgen.worlds import landscape as module
from vidgen.worlds.landscape_captions import EMPTY_TEMPLATES, HELD_OUT, HELD_OUT_EMPTY, TEMPLATES

RIGHT_AND_BACK = (CameraMove("pan right", 5.0, 12.0), CameraMove("hold", 1.0, 0.0), CameraMove("pan left", 5.0, 12.0))


@pytest.fixture(scope="module")
def world() -> LandscapeWorld:
    return LandscapeWorld()


@pytest.mark.parametrize("weather", WEATHERS)
def test_a_range_of_frames_equals_the_same_frames_of_the_whole(world, weather):
    scene = world.scene(3, weather=weather, traveller=TRAVELLERS[WEATHERS.index(weather) + 1], moves=RIGHT_AND_BACK)
    whole = world.render(scene)
    assert whole.dtype == np.uint8 and whole.shape == (132, 64, 112, 3)
    # A new world has empty caches: the order in which things are drawn must not show.
    for start, count in ((100, 10), (10, 10), (131, 1)):
        assert np.array_equal(LandscapeWorld().render(scene, start, count), whole[start : start + count])


@pytest.mark.parametrize("biome", BIOMES)
def test_a_clear_empty_scene_is_exactly_its_background_so_a_revisit_shows_the_same(world, biome):
    scene = world.scene(11, biome=biome, weather="clear", traveller="none", moves=RIGHT_AND_BACK)
    for frame in (0, 30, 66, 100, 131):
        picture = world.render(scene, frame, 1)[0]
        assert np.array_equal(picture, world.background(scene, scene.camera_x(frame)))
        other_time = LandscapeScene(scene.seed, biome, scene.time_of_day, "clear", "none", scene.moves[:1])
        assert np.array_equal(picture, world.background(other_time, scene.camera_x(frame)))


@pytest.mark.parametrize("biome", BIOMES)
def test_ground_moves_with_the_camera_and_tiles_have_no_seams(world, biome):
    scene = world.scene(5, biome=biome, time_of_day="day", weather="clear", traveller="none", moves=RIGHT_AND_BACK)
    # Rows 54.. show nothing but ground; positions cover tile borders on both sides of the origin.
    before = world.background(scene, -140.0)[54:]
    for camera in range(-139, 140):
        now = world.background(scene, float(camera))[54:]
        assert np.array_equal(now[:, :-1], before[:, 1:])
        before = now


def test_places_do_not_depend_on_caches_that_were_evicted(monkeypatch):
    scene = LandscapeWorld().scene(8, moves=(CameraMove("pan right", 20.0, 12.0), CameraMove("pan left", 20.0, 12.0)))
    frames = range(0, 480, 60)
    roomy = LandscapeWorld()
    expected = [roomy.render(scene, frame, 1) for frame in frames]
    monkeypatch.setattr(module, "_MAX_TILES", 5)
    tight = LandscapeWorld()
    for frame, picture in zip(frames, expected):
        assert np.array_equal(tight.render(scene, frame, 1), picture)
        assert all(len(art.tiles) <= 5 for art in tight._art.values())


def test_scene_cache_is_bounded():
    world = LandscapeWorld(16, 32)
    for seed in range(20):
        world.render(world.scene(seed, seconds=1.0), 0, 1)
    assert len(world._art) <= module._MAX_SCENES


@pytest.mark.parametrize("size", [(64, 112), (96, 160), (32, 56), (128, 128)])
def test_a_size_changes_resolution_and_not_content(size):
    height, width = size
    world = LandscapeWorld(height, width)
    scene = world.scene(
        2, biome="coast", time_of_day="day", weather="clear", traveller="balloon", moves=RIGHT_AND_BACK
    )
    picture = world.render(scene, 40, 1)[0].astype(float)
    assert picture.shape == (height, width, 3)
    reference = LandscapeWorld().render(scene, 40, 1)[0].astype(float)

    def coarse(image: np.ndarray) -> np.ndarray:
        rows, columns = image.shape[0] // 8, image.shape[1] // 8
        cells = [np.array_split(band, 7, axis=1) for band in np.array_split(image, 4, axis=0)]
        assert rows and columns
        return np.array([[cell.mean(axis=(0, 1)) for cell in row] for row in cells])

    assert np.abs(coarse(picture) - coarse(reference)).max() < 12.0


@pytest.mark.parametrize("traveller", TRAVELLERS[1:])
def test_the_traveller_is_always_on_screen_and_inside_its_box(world, traveller):
    for seed in range(3):
        scene = world.scene(seed, 60.0, weather="clear", traveller=traveller)
        for frame in range(0, scene.num_frames, 45):
            box = next(item for item in scene.visible_objects(frame) if item.object_id == "traveller")
            assert min(box.x, box.y) >= 0 and box.x + box.width <= 112 and box.y + box.height <= 64
            assert box.width >= 12
            still = world.background(scene, scene.camera_x(frame)).astype(int)
            changed = np.abs(world.render(scene, frame, 1)[0] - still).max(axis=2) > 24
            rows, columns = np.nonzero(changed)
            inside = (np.abs(columns + 0.5 - box.x - box.width / 2) < box.width / 2 + 1.5) & (
                np.abs(rows + 0.5 - box.y - box.height / 2) < box.height / 2 + 1.5
            )
            assert inside.sum() >= 30
            if traveller in ("balloon", "birds"):
                assert inside.all()


def test_objects_keep_their_place_in_the_world(world):
    scene = world.scene(4, biome="meadow", weather="clear", traveller="none", moves=RIGHT_AND_BACK)
    places: dict[str, float] = {}
    for frame in range(scene.num_frames):
        for item in scene.visible_objects(frame):
            place = item.x + scene.camera_x(frame) * module.PARALLAX[item.layer]
            assert places.setdefault(item.object_id, place) == pytest.approx(place)
            assert item.x < 112 and item.x + item.width > 0
    assert len(places) > 8


def test_the_background_has_something_where_an_object_is_said_to_stand(world):
    scene = world.scene(6, biome="coast", time_of_day="day", weather="clear", traveller="none", moves=RIGHT_AND_BACK)
    towers = [item for frame in range(0, 132, 6) for item in scene.visible_objects(frame) if item.kind == "lighthouse"]
    seeds = itertools.count(7)
    while not towers:
        scene = world.scene(
            next(seeds), biome="coast", time_of_day="day", weather="clear", traveller="none", moves=RIGHT_AND_BACK
        )
        towers = [item for item in scene.visible_objects(0) if item.kind == "lighthouse" and 0 <= item.x <= 104]
    frame = next(
        f for f in range(132) if any(i.kind == "lighthouse" and 0 <= i.x <= 104 for i in scene.visible_objects(f))
    )
    tower = next(i for i in scene.visible_objects(frame) if i.kind == "lighthouse" and 0 <= i.x <= 104)
    picture = world.background(scene, scene.camera_x(frame)).astype(int)
    middle = picture[int(tower.y + 2) : int(tower.y + tower.height), int(tower.x + tower.width / 2)]
    assert ((middle[:, 0] - middle[:, 2]) > 90).any(), "no red stripe in the middle of the lighthouse"


def test_camera_path_is_smooth_and_its_speed_is_what_the_moves_say(world):
    scene = world.scene(0, moves=RIGHT_AND_BACK)
    path = np.array([scene.camera_x(frame) for frame in range(scene.num_frames)])
    velocity = np.diff(path) * scene.fps
    assert path[0] == 0.0
    assert velocity[:55] == pytest.approx(np.full(55, 12.0))
    assert velocity[-40:] == pytest.approx(np.full(40, -12.0))
    assert np.abs(np.diff(velocity)).max() < 3.5
    assert (
        scene.move_at(0).kind == "pan right"
        and scene.move_at(60).kind == "hold"
        and scene.move_at(72).kind == "pan left"
    )


def test_drawn_moves_fill_the_time_and_returns_are_common(world):
    returns = 0
    for seed in range(60):
        scene = world.scene(seed, 60.0)
        assert scene.seconds == pytest.approx(60.0) and scene.num_frames == 720
        assert all(4.0 <= move.seconds <= 12.0 for move in scene.moves)
        assert all((a.kind, a.speed) != (b.kind, b.speed) for a, b in zip(scene.moves, scene.moves[1:]))
        pans = [move.kind for move in scene.moves if move.kind != "hold"]
        returns += any(a != b for a, b in itertools.pairwise(pans))
    assert returns > 45
    assert world.scene(1, 2.5).seconds == pytest.approx(2.5)


def test_a_scene_is_a_function_of_its_seed_and_given_attributes_are_kept(world):
    assert world.scene(7) == world.scene(np.int64(7)) == LandscapeWorld().scene(7)
    scenes = [world.scene(seed) for seed in range(300)]
    for name, allowed in (("biome", BIOMES), ("time_of_day", TIMES), ("weather", WEATHERS), ("traveller", TRAVELLERS)):
        assert {getattr(scene, name) for scene in scenes} == set(allowed)
    assert world.scene(7, biome="desert").attributes["biome"] == "desert"
    pictures = [
        world.render(world.scene(seed, biome="meadow", time_of_day="day", weather="clear"), 0, 1) for seed in (1, 2)
    ]
    assert not np.array_equal(*pictures)


def test_attributes_change_the_picture_clearly(world):
    def mean(**attributes: str) -> np.ndarray:
        names = {"biome": "meadow", "time_of_day": "day", "weather": "clear", "traveller": "none"} | attributes
        pictures = [world.background(world.scene(seed, **names), 0.0).astype(float) for seed in range(4)]
        return np.stack([np.mean(pictures, axis=0)[rows].mean(axis=(0, 1)) for rows in (slice(0, 28), slice(48, 64))])

    for name, allowed in (("biome", BIOMES), ("time_of_day", TIMES)):
        looks = [mean(**{name: value}) for value in allowed]
        assert min(np.abs(a - b).max() for a, b in itertools.combinations(looks, 2)) > 20.0, name
    assert mean(time_of_day="night").mean() < 0.4 * mean().mean()


@pytest.mark.parametrize("weather", WEATHERS[1:])
def test_weather_moves_with_time_while_the_camera_holds(world, weather):
    scene = world.scene(3, weather=weather, time_of_day="day", traveller="none", moves=(CameraMove("hold", 4.0, 0.0),))
    frames = world.render(scene).astype(int)
    assert (frames[0] != frames[24]).mean() > 0.05
    still = world.scene(3, weather="clear", time_of_day="day", traveller="none", moves=scene.moves)
    assert (world.render(still, 0, 1) == world.render(still, 30, 1)).all()


def test_pictures_carry_little_noise_that_a_small_autoencoder_cannot_keep(world):
    shares = []
    for seed in range(12):
        picture = world.background(world.scene(seed, weather="clear"), 0.0).astype(float)
        # Energy of what a 2 x 2 box filter removes, against all of the variance (0.75 for white noise).
        small = picture.reshape(32, 2, 56, 2, 3).mean(axis=(1, 3)).repeat(2, 0).repeat(2, 1)
        shares.append(((picture - small) ** 2).mean() / picture.var(axis=(0, 1)).mean())
    assert np.mean(shares) < 0.08


def all_scenes():
    moves = (CameraMove("pan right", 1.0, 6.0), CameraMove("pan right", 1.0, 12.0), CameraMove("pan left", 1.0, 6.0),
             CameraMove("pan left", 1.0, 12.0), CameraMove("hold", 1.0, 0.0))  # fmt: skip
    for index, values in enumerate(itertools.product(BIOMES, TIMES, WEATHERS, TRAVELLERS)):
        yield LandscapeScene(index, *values, moves=moves)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_caption_states_every_attribute_and_can_be_parsed_back(split):
    for scene in all_scenes():
        frame = 12 * (scene.seed % 5)
        move = scene.move_at(frame)
        expected = {**scene.attributes, "move": move.kind, "speed": move.pace}
        assert parse_caption(caption(scene, frame, scene.seed, split)) == expected


def test_captions_vary_and_held_out_sentences_stay_out_of_training():
    assert len(TEMPLATES) >= 6 and len(EMPTY_TEMPLATES) >= 6
    assert not set(TEMPLATES + EMPTY_TEMPLATES) & set(HELD_OUT + HELD_OUT_EMPTY)
    scene = next(all_scenes())
    train = {caption(scene, 0, seed) for seed in range(200)}
    test = {caption(scene, 0, seed, split="test") for seed in range(200)}
    assert len(train) > 100 and not train & test
    assert all("video" in text or " and " in text.split(",")[0] for text in test)
    assert not any("a video" in text.lower() for text in train)


def test_the_prompt_plan_changes_only_the_camera_words(world):
    scene = world.scene(4, 60.0)
    plan = prompt_plan(scene, 9)
    assert [seconds for _, seconds in plan] == [move.seconds for move in scene.moves]
    for (text, _), move in zip(plan, scene.moves):
        parsed = parse_caption(text)
        assert (parsed["move"], parsed["speed"]) == (move.kind, move.pace)
    assert plan == prompt_plan(scene, 9)
    assert plan[0][0] == caption(scene, 0, 9)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ({"biome": "medow"}, ("'medow'", "meadow, desert", "nearest: 'meadow'")),
        ({"time_of_day": "nigth"}, ("'nigth'", "nearest: 'night'")),
        ({"weather": "snowy"}, ("'snowy'", "nearest: 'snow'")),
        ({"traveller": "aeroplane"}, ("'aeroplane'", "nearest: 'airplane'")),
        ({"seconds": 0.0}, ("seconds is 0.0", "> 0")),
        ({"moves": ()}, ("moves is empty",)),
    ],
)
def test_a_bad_scene_names_what_is_allowed_and_what_is_near(world, arguments, parts):
    with pytest.raises(ValueError) as error:
        world.scene(0, **arguments)
    assert all(part in str(error.value) for part in parts)


def test_bad_sizes_ranges_moves_and_splits_are_refused(world):
    with pytest.raises(ValueError, match="height is 60; allowed: positive multiples of 8, nearest: 64"):
        LandscapeWorld(60, 112)
    with pytest.raises(ValueError, match="nearest: 8"):
        LandscapeWorld(64, 0)
    scene = world.scene(0, 5.0)
    with pytest.raises(ValueError, match=r"within \[0, 60\)"):
        world.render(scene, 55, 10)
    with pytest.raises(ValueError, match="nearest: 'pan left'"):
        CameraMove("pan lef", 1.0, 6.0)
    with pytest.raises(ValueError, match="speed of a 'hold'"):
        CameraMove("hold", 1.0, 6.0)
    with pytest.raises(ValueError, match="nearest: 'test'"):
        caption(scene, 0, 0, split="tests")
    with pytest.raises(ValueError, match="no camera move"):
        parse_caption("a green meadow at noon in the rain")


def test_importing_the_worlds_needs_neither_torch_nor_diffusers():
    code = "import sys, vidgen.worlds; sys.exit(any(name in sys.modules for name in ('torch', 'diffusers', 'av')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
