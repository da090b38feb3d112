"""Captions for landscape scenes: a small grammar with varied wording, and its inverse.

Every caption states biome, time of day, weather, traveller and the camera move with its speed. Clear weather and the
absence of a traveller have words of their own, so that nothing has to be guessed from silence. Some sentence templates
are held out: they appear only with `split="test"`, to test whether a model understands words rather than sentences.
"""

from __future__ import annotations

import difflib
import random
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vidgen.worlds.landscape import LandscapeScene

# Noun phrase of the place, following a preposition.
_PLACES: dict[str, tuple[str, ...]] = {
    "meadow": (
        "a green meadow",
        "rolling green hills with red-roofed houses",
        "a grassy countryside",
        "lush farmland",
    ),
    "desert": ("a sandy desert", "orange dunes with cacti", "an arid land of mesas", "a dry cactus desert"),
    "mountains": (
        "snow-capped mountains",
        "a rocky mountain range",
        "tall gray peaks and pines",
        "an alpine valley",
    ),
    "coast": ("a tropical coast", "a sandy beach by the sea", "the seashore with palm trees", "an ocean shoreline"),
    "forest": (
        "an autumn forest",
        "woods in fall colors",
        "a forest of orange and red trees",
        "an autumnal woodland",
    ),
    "snowfield": (
        "a snowy field",
        "a white winter plain",
        "a frozen landscape with firs",
        "snow-covered land with cabins",
    ),
}

_TIMES: dict[str, tuple[str, ...]] = {
    "dawn": ("at dawn", "at sunrise", "in the early morning", "at daybreak"),
    "day": ("at noon", "in broad daylight", "in the daytime", "at midday"),
    "dusk": ("at dusk", "at sunset", "in the evening glow", "at twilight"),
    "night": ("at night", "by moonlight", "after dark", "at midnight"),
}

_WEATHERS: dict[str, tuple[str, ...]] = {
    "clear": ("in clear weather", "under a clear sky", "in fine weather", "with clear air"),
    "rain": ("in the rain", "in light rain", "during a rain shower", "in rainy weather"),
    "snow": ("in falling snow", "during a snowfall", "while it is snowing", "amid drifting snowflakes"),
    "fog": ("in thick fog", "in the mist", "in foggy weather", "through a misty haze"),
}

# Subject and the verb that suits it, in the present tense.
_TRAVELLERS: dict[str, tuple[tuple[str, str], ...]] = {
    "balloon": (
        ("a hot-air balloon", "floats"),
        ("a striped balloon", "drifts"),
        ("a hot air balloon", "hovers"),
        ("a colorful balloon", "sails"),
    ),
    "birds": (
        ("a flock of birds", "flies"),
        ("a group of birds", "glides"),
        ("several birds", "flap"),
        ("a few flying birds", "wheel"),
    ),
    "train": (
        ("a steam train", "rolls"),
        ("a train", "travels"),
        ("a locomotive with wagons", "steams"),
        ("a passenger train", "runs"),
    ),
    "airplane": (
        ("an airplane", "flies"),
        ("a plane", "cruises"),
        ("a jet airplane", "soars"),
        ("a white airliner", "passes"),
    ),
}
_EMPTY = ("nothing is traveling", "no traveler is in sight", "the scene is empty", "nobody passes by")

# The camera as subject: "the camera ...".
_MOVES: dict[tuple[str, str], tuple[str, ...]] = {
    ("pan right", "slow"): (
        "pans slowly to the right",
        "moves gently right",
        "glides slowly rightward",
        "slowly pans right",
    ),
    ("pan right", "fast"): (
        "pans quickly to the right",
        "moves fast to the right",
        "races rightward",
        "quickly pans right",
    ),
    ("pan left", "slow"): (
        "pans slowly to the left",
        "moves gently left",
        "glides slowly leftward",
        "slowly pans left",
    ),
    ("pan left", "fast"): (
        "pans quickly to the left",
        "moves fast to the left",
        "races leftward",
        "quickly pans left",
    ),
    ("hold", "still"): ("holds still", "stays still", "does not move", "remains static"),
}

# {who} subject, {verb} its verb, {over} "over" or "past", {place}, {time}, {weather}, {move}.
TEMPLATES: tuple[str, ...] = (
    "{who} {verb} {over} {place} {time} {weather} while the camera {move}",
    "{time}, {who} {verb} {over} {place} {weather}; the camera {move}",
    "the camera {move} as {who} {verb} {over} {place} {weather} {time}",
    "{weather}, {who} {verb} {over} {place} {time}, and the camera {move}",
    "{place} {time} {weather}: {who} {verb} by as the camera {move}",
    "{place} {weather} {time}, {who} {verb} by, the camera {move}",
    "a view of {place} {time} {weather}. {who} {verb} by. the camera {move}",
)
EMPTY_TEMPLATES: tuple[str, ...] = (
    "{place} {time} {weather}, {empty}, while the camera {move}",
    "{time}, the camera {move} over {place} {weather}; {empty}",
    "the camera {move} across {place} {weather} {time}, and {empty}",
    "{weather}, {empty} in {place} {time} as the camera {move}",
    "a view of {place} {time} {weather}. {empty}. the camera {move}",
    "{place} {weather} {time}: {empty}, the camera {move}",
)
# Sentences that training never sees: test split only.
HELD_OUT: tuple[str, ...] = (
    "a video {time} of {place}, where {who} {verb} along {weather}. the camera {move}",
    "{weather} and {time}, the camera {move}: {place}, and {who} {verb} there",
)
HELD_OUT_EMPTY: tuple[str, ...] = (
    "a video {time} of {place} {weather}, where {empty}. the camera {move}",
    "{weather} and {time}, the camera {move}: {place}, and {empty}",
)
SPLITS = ("train", "test")


def _capitalize(text: str) -> str:
    return re.sub(r"(^|\. )([a-z])", lambda match: match.group(1) + match.group(2).upper(), text)


def caption(scene: LandscapeScene, frame: int, seed: int, split: str = "train") -> str:
    """Describes a scene with the camera move under way at a frame.

    The same scene, seed and split give the same words for everything but the camera, whatever the frame.

    Args:
        scene: the scene.
        frame: frame index; decides which camera move is described.
        seed: chooses the wording.
        split: "train", or "test" for the held-out sentence templates.

    Returns:
        One line of text.

    Raises:
        ValueError: for an unknown split.
    """
    if split not in SPLITS:
        near = difflib.get_close_matches(str(split), SPLITS, n=1, cutoff=0.0)[0]
        raise ValueError(f"split {split!r} is unknown; allowed: {', '.join(SPLITS)}; nearest: {near!r}")
    # One generator per question, so that the answer to one does not shift the others.
    attributes = "|".join(scene.attributes.values())
    choose = random.Random(f"{seed}|{attributes}").choice
    place, time, weather = (
        choose(_PLACES[scene.biome]),
        choose(_TIMES[scene.time_of_day]),
        choose(_WEATHERS[scene.weather]),
    )
    move = scene.move_at(frame)
    words = _MOVES[move.kind, move.pace]
    fields = {"place": place, "time": time, "weather": weather}
    fields["move"] = random.Random(f"{seed}|{move.kind}|{move.pace}").choice(words)
    if scene.traveller == "none":
        fields["empty"] = choose(_EMPTY)
        template = choose(HELD_OUT_EMPTY if split == "test" else EMPTY_TEMPLATES)
    else:
        fields["who"], fields["verb"] = choose(_TRAVELLERS[scene.traveller])
        fields["over"] = "past" if scene.traveller == "train" else "over"
        template = choose(HELD_OUT if split == "test" else TEMPLATES)
    return _capitalize(template.format(**fields))


def prompt_plan(scene: LandscapeScene, seed: int, split: str = "train") -> list[tuple[str, float]]:
    """One (prompt, seconds) line per camera move, all in the wording of one seed.

    Args:
        scene: the scene.
        seed: chooses the wording.
        split: as for `caption`.
    """
    plan, start = [], 0.0
    for move in scene.moves:
        middle = int((start + 0.5 * move.seconds) * scene.fps)
        plan.append((caption(scene, middle, seed, split), move.seconds))
        start += move.seconds
    return plan


def _find(text: str, phrases: dict[str, tuple[str, ...]], what: str) -> str:
    """The value one of whose phrases is in the text; the longest phrase wins."""
    found = [(len(phrase), value) for value, options in phrases.items() for phrase in options if phrase in text]
    if not found:
        raise ValueError(f"no {what} in {text!r}; allowed phrases: {'; '.join(sum(phrases.values(), ()))}")
    return max(found)[1]


def parse_caption(text: str) -> dict[str, str]:
    """Recovers what a caption says.

    Args:
        text: what `caption` returned.

    Returns:
        "biome", "time_of_day", "weather", "traveller", "move" (as in `MOVES`) and "speed" ("slow", "fast", "still").

    Raises:
        ValueError: if an attribute is missing.
    """
    text = text.lower()
    travellers = {value: tuple(f"{who} {verb}" for who, verb in options) for value, options in _TRAVELLERS.items()} | {
        "none": _EMPTY
    }
    moves = {
        f"{kind}|{pace}": tuple(f"camera {words}" for words in options) for (kind, pace), options in _MOVES.items()
    }
    move, speed = _find(text, moves, "camera move").split("|")
    return {
        "biome": _find(text, _PLACES, "biome"),
        "time_of_day": _find(text, _TIMES, "time of day"),
        "weather": _find(text, _WEATHERS, "weather"),
        "traveller": _find(text, travellers, "traveller"),
        "move": move,
        "speed": speed,
    }
