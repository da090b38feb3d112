"""What happens in a simulated knee replacement: who is in the room, what they do, where everything is.

A take runs through the eight phases of 4D-OR (arXiv 2203.11937) with their mean durations. In each phase activities
begin and end at random, with the share of frames and the mean duration that the public labels have, so rare actions
are rare here too. Bodies and hands then move to where the activities are, and closeness is measured between them:
every label is a fact of the scene, none is drawn beside it.

Each surgical action has tools of a few looks: a body and a color, drawn without regard to the action, and a tip that
fits it. A take has one look per action. So neither color nor body names an action, and a frame of a rare action
resembles most those of other takes that use the same look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scene_graph.formats import OR4D_ROLES, UNNAMED_ROLE, LabeledFrame, forward_relations, mirrored_relations
from scene_graph.schema import SceneGraph, Triplet
from vidgen.runtime.device import derive_seed
from vidgen.runtime.errors import ConfigError

HEAD_SURGEON, ASSISTANT, CIRCULATOR, ANAESTHETIST = "head surgeon", "assistant surgeon", "circulator", "anaesthetist"
# The fifth person of a busy room has no name of its own in the labels.
VISITOR = "visitor"
ROLES = (HEAD_SURGEON, ASSISTANT, CIRCULATOR, ANAESTHETIST, VISITOR)
PATIENT, TABLE, INSTRUMENT = "patient", "operating table", "instrument"
INSTRUMENT_TABLE, SECONDARY_TABLE, MACHINE = "instrument table", "secondary table", "anesthesia equipment"
ACTIONS = ("cementing", "cleaning", "cutting", "drilling", "hammering", "sawing", "suturing")
# Held where no action of this moment needs a tool of its own.
RETRACTOR = "retractor"

# Mean seconds of each phase over the ten takes of 4D-OR.
PHASE_SECONDS = {
    "sterile": 47.0,
    "roll_in": 91.0,
    "patient_prep": 175.0,
    "knee_prep": 116.0,
    "knee_insert": 102.0,
    "surgery_conclusion": 88.0,
    "roll_out": 24.0,
    "cleanup": 30.0,
}
WITH_PATIENT = ("roll_in", "patient_prep", "knee_prep", "knee_insert", "surgery_conclusion")
# The patient is still seen on the table for this part of the last ride.
SHARE_OF_ROLL_OUT = 0.68
# Mean seconds that an activity lasts (validation and test takes of 4D-OR).
EPISODE_SECONDS = {
    "holding": 19.0,
    "touching": 5.2,
    "preparing": 12.0,
    "assisting": 2.4,
    "manipulating": 10.0,
    "cleaning": 9.0,
    "hammering": 9.0,
    "sawing": 7.0,
    "cutting": 21.0,
    "suturing": 12.0,
    "drilling": 12.0,
    "cementing": 12.0,
}
# Share of the frames of a phase in which an action happens; the first of a phase comes first.
ACTION_SHARES = {
    "patient_prep": {"cleaning": 0.11},
    "knee_prep": {"cutting": 0.21, "sawing": 0.17, "drilling": 0.12, "cleaning": 0.11},
    "knee_insert": {"cementing": 0.11, "hammering": 0.22, "cleaning": 0.08},
    "surgery_conclusion": {"suturing": 0.14},
}
# Share of the frames of a phase in which somebody prepares or pushes, and in which a role holds, touches, assists.
PREPARING_SHARES = {"patient_prep": 0.54, "surgery_conclusion": 0.41}
MANIPULATING_SHARES = {"roll_in": 0.17, "roll_out": 0.54}
HOLDING_SHARES = {
    "patient_prep": {HEAD_SURGEON: 0.37, ASSISTANT: 0.29},
    "knee_prep": {HEAD_SURGEON: 0.79, ASSISTANT: 0.50},
    "knee_insert": {HEAD_SURGEON: 0.58, ASSISTANT: 0.36},
    "surgery_conclusion": {HEAD_SURGEON: 0.33, ASSISTANT: 0.20},
}
TOUCHING_SHARES = {
    "roll_in": {ANAESTHETIST: 0.08, CIRCULATOR: 0.06},
    "patient_prep": {ASSISTANT: 0.16, HEAD_SURGEON: 0.10, ANAESTHETIST: 0.09, CIRCULATOR: 0.06},
    "knee_prep": {ASSISTANT: 0.45, HEAD_SURGEON: 0.14},
    "knee_insert": {ASSISTANT: 0.42, HEAD_SURGEON: 0.14},
    "surgery_conclusion": {ASSISTANT: 0.10, HEAD_SURGEON: 0.07},
}
ASSISTING_SHARES = {"patient_prep": 0.19, "knee_prep": 0.28, "knee_insert": 0.20, "surgery_conclusion": 0.06}
# How often a second person cleans or prepares along, from instances per frame in the labels.
SHARE_CLEANING_TOGETHER = 0.26
SHARE_PREPARING_TOGETHER = 0.6
# Probabilities of 0, 1, 2, … people in the room, and who comes first; a tuple within the order is shuffled per phase.
STAFF = {
    "sterile": ((0.48, 0.32, 0.20), ((CIRCULATOR,), (ASSISTANT,), (HEAD_SURGEON,))),
    "roll_in": ((0.08, 0.22, 0.50, 0.20), ((CIRCULATOR, ANAESTHETIST), (ASSISTANT,), (HEAD_SURGEON,))),
    "patient_prep": ((0.0, 0.10, 0.24, 0.56, 0.09, 0.01), ((HEAD_SURGEON, ASSISTANT), (CIRCULATOR, ANAESTHETIST))),
    "knee_prep": ((0.0, 0.0, 0.05, 0.86, 0.08, 0.01), ((HEAD_SURGEON,), (ASSISTANT,), (CIRCULATOR, ANAESTHETIST))),
    "knee_insert": ((0.0, 0.0, 0.05, 0.88, 0.07), ((HEAD_SURGEON,), (ASSISTANT,), (CIRCULATOR, ANAESTHETIST))),
    "surgery_conclusion": ((0.0, 0.06, 0.20, 0.70, 0.04), ((HEAD_SURGEON, ASSISTANT), (CIRCULATOR, ANAESTHETIST))),
    "roll_out": ((0.0, 0.20, 0.65, 0.15), ((CIRCULATOR, ANAESTHETIST), (ASSISTANT,))),
    "cleanup": ((0.62, 0.28, 0.10), ((CIRCULATOR,), (ASSISTANT,))),
}
STAFF_SECONDS = 30.0

# Meters. The floor plan is 6 x 5; x runs from the head of the patient to the feet.
ROOM = (6.0, 5.0)
CLOSE_DISTANCE = 0.9
TABLE_CENTER, TABLE_HALF, TABLE_HEIGHT = np.array([3.0, 2.5]), (1.0, 0.3), 0.86
PATIENT_HALF = (0.95, 0.24)
DOOR = np.array([7.2, 2.5])
KNEE = np.array([0.42, 0.0, 1.15])
SPEED = 1.0

# Bodies and colors of tools; a look is one of each.
BODIES = ("pistol", "rod", "tee", "bulb", "rings")
HUES = {
    "red": (212, 36, 40),
    "yellow": (240, 212, 30),
    "green": (40, 176, 60),
    "cyan": (40, 206, 220),
    "violet": (150, 60, 206),
    "black": (30, 30, 36),
}
MAX_LOOKS = 3
OR4D_SPLITS = {"train": (1, 3, 5, 7, 9, 10), "validation": (4, 8), "test": (2, 6)}
CAMERAS = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class SimulatorConfig:
    """What is simulated.

    Attributes:
        takes: recordings of one operation each. Ten are split as those of 4D-OR, other numbers as 28 : 3 : 5.
        frames_per_take: frames of each; an operation lasts 11 minutes on average whatever their number, so 190
            frames are 3.5 seconds apart and 673 one.
        views: cameras that are rendered, 1 to 6; camera 2 looks at the knee from above.
        size: height and width of an image, pixels.
        looks_per_action: looks of the tools of each action in the training takes.
        looks_unseen: share of the tools of test takes whose look is in no other split.
        seed: of everything.

    Raises:
        ConfigError: a field out of range, or too few takes to show each look in two of those for training.
    """

    takes: int = 10
    frames_per_take: int = 190
    views: tuple[int, ...] = (2, 1, 3, 5)
    size: int = 64
    looks_per_action: int = 3
    looks_unseen: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "views", tuple(self.views))
        if not 4 <= self.takes <= 999:
            raise ConfigError(f"takes={self.takes}; allowed: 4 to 999.")
        if not 16 <= self.frames_per_take <= 5000:
            raise ConfigError(f"frames_per_take={self.frames_per_take}; allowed: 16 to 5000.")
        if not self.views or len(set(self.views)) < len(self.views) or not set(self.views) <= set(CAMERAS):
            raise ConfigError(f"views={self.views}; allowed: cameras 1 to {len(CAMERAS)}, each once, at least one.")
        if not 32 <= self.size <= 512:
            raise ConfigError(f"size={self.size}; allowed: 32 to 512 pixels.")
        if not 1 <= self.looks_per_action <= MAX_LOOKS:
            raise ConfigError(f"looks_per_action={self.looks_per_action}; allowed: 1 to {MAX_LOOKS}.")
        if not 0 <= self.looks_unseen <= 1:
            raise ConfigError(f"looks_unseen={self.looks_unseen}; allowed: 0 to 1.")
        num_train = len(split_takes(self.takes)["train"])
        if num_train < 2 * self.looks_per_action:
            raise ConfigError(
                f"takes={self.takes} are {num_train} for training, too few to show {self.looks_per_action} looks of "
                f"each action twice; allowed: looks_per_action up to {num_train // 2} or more takes."
            )

    @property
    def seconds_per_frame(self) -> float:
        """Mean time between two frames; that of a take differs with its length."""
        return sum(PHASE_SECONDS.values()) / self.frames_per_take


def split_takes(takes: int) -> dict[str, tuple[int, ...]]:
    """Numbers of the takes of each split."""
    if takes == sum(len(numbers) for numbers in OR4D_SPLITS.values()):
        return dict(OR4D_SPLITS)
    num_test, num_validation = max(1, round(takes * 5 / 36)), max(1, round(takes * 3 / 36))
    num_train = takes - num_test - num_validation
    numbers = tuple(range(1, takes + 1))
    return {
        "train": numbers[:num_train],
        "validation": numbers[num_train : num_train + num_validation],
        "test": numbers[num_train + num_validation :],
    }


@dataclass(frozen=True)
class Look:
    """How the tool of an action looks in a take.

    Attributes:
        action: it is used for.
        index: of the look among those of the action.
        body: shape of all but the tip, one of `BODIES`.
        hue: color of the body, one of `HUES`.
        is_unseen: whether only test takes have it.
    """

    action: str
    index: int
    body: str
    hue: str
    is_unseen: bool = False


@dataclass(frozen=True)
class Study:
    """Which takes are in which split, and the look of each action's tool in each take."""

    splits: Mapping[str, tuple[int, ...]]
    looks: Mapping[int, Mapping[str, Look]]


def plan_study(config: SimulatorConfig) -> Study:
    """Share takes and looks out: each seen look in at least two training takes, unseen ones in test takes only."""
    rng = np.random.default_rng(derive_seed(config.seed, 1))
    splits, num_seen = split_takes(config.takes), config.looks_per_action
    looks = _draw_looks(rng, num_seen)
    chosen: dict[int, dict[str, Look]] = {take: {} for take in range(1, config.takes + 1)}
    for action in ACTIONS:
        balanced = np.arange(len(splits["train"])) % num_seen
        for take, index in zip(splits["train"], rng.permutation(balanced)):
            chosen[take][action] = looks[action][index]
        for take in (*splits["validation"], *splits["test"]):
            chosen[take][action] = looks[action][rng.integers(num_seen)]
    places = [(take, action) for take in splits["test"] for action in ACTIONS]
    for place in rng.choice(len(places), round(config.looks_unseen * len(places)), replace=False):
        take, action = places[place]
        chosen[take][action] = looks[action][num_seen]
    return Study(splits, chosen)


def _draw_looks(rng: np.random.Generator, num_seen: int) -> dict[str, list[Look]]:
    """For each action `num_seen` looks and one for test takes; no two looks share body and color."""
    names = list(HUES)
    while True:
        free = [(body, hue) for body in BODIES for hue in names]
        rng.shuffle(free)
        looks: dict[str, list[Look]] = {action: [] for action in ACTIONS}
        for index in range(num_seen + 1):
            for action in ACTIONS:
                used = {look.hue for look in looks[action]}
                pair = next((pair for pair in free if pair[1] not in used), None)
                if pair is not None:
                    free.remove(pair)
                    looks[action].append(Look(action, index, *pair, is_unseen=index == num_seen))
        if all(len(found) == num_seen + 1 for found in looks.values()):
            return looks


@dataclass(frozen=True)
class TakeStyle:
    """What differs between takes and has no meaning: colors, light, arrangement, cameras.

    Attributes:
        colors: RGB by name of what is colored.
        gain: of the light.
        cast: factor of each color channel.
        side: 1 or -1, the side of the table on which the head surgeon stands.
        rectangles: center x, y and half sizes of the furniture that stays.
        camera_shift: meters by which each camera is displaced, `(6, 3)`.
        camera_aim: meters by which the point it looks at is, `(6, 3)`.
    """

    colors: Mapping[str, tuple[int, int, int]]
    gain: float
    cast: tuple[float, float, float]
    side: int
    rectangles: Mapping[str, tuple[float, float, float, float]]
    camera_shift: np.ndarray
    camera_aim: np.ndarray


_PALETTES = {
    "floor": ((128, 146, 150), (150, 150, 138), (110, 130, 118), (156, 142, 124), (122, 126, 144)),
    "wall": ((196, 206, 206), (206, 204, 190), (188, 200, 212), (200, 210, 196)),
    "gown": ((70, 128, 138), (84, 116, 158), (92, 140, 108), (120, 136, 150)),
    "scrubs": ((150, 170, 178), (166, 150, 166), (148, 168, 146), (172, 164, 140)),
    "cap": ((92, 150, 166), (150, 180, 152), (176, 176, 186), (120, 120, 156)),
    "drape": ((74, 136, 146), (62, 108, 150), (88, 146, 120), (134, 158, 176)),
    "cloth": ((96, 148, 158), (100, 130, 166), (118, 158, 138)),
    "skin": ((226, 184, 156), (204, 158, 126), (164, 116, 86), (236, 200, 178)),
    "glove": ((236, 232, 214), (216, 224, 232), (230, 214, 190)),
    "machine": ((206, 208, 206), (184, 194, 206), (212, 204, 188)),
}


def _draw_style(rng: np.random.Generator) -> TakeStyle:
    colors = {}
    for name, palette in _PALETTES.items():
        color = np.array(palette[rng.integers(len(palette))]) + rng.uniform(-10, 10, 3)
        colors[name] = tuple(int(value) for value in np.clip(color, 0, 255))
    side = int(rng.choice((-1, 1)))
    x, y = TABLE_CENTER
    rectangles = {
        INSTRUMENT_TABLE: (x + rng.uniform(0.7, 1.0), y - side * rng.uniform(1.56, 1.72), 0.55, 0.26),
        SECONDARY_TABLE: (x + rng.uniform(1.6, 2.2), y + side * rng.uniform(1.5, 1.9), 0.4, 0.28),
        MACHINE: (x - rng.uniform(1.45, 1.75), y + side * rng.uniform(0.3, 0.7), 0.28, 0.3),
    }
    return TakeStyle(
        colors=colors,
        gain=float(rng.uniform(0.78, 1.15)),
        cast=tuple(float(value) for value in rng.uniform(0.92, 1.08, 3)),
        side=side,
        rectangles=rectangles,
        camera_shift=rng.normal(0, 0.06, (len(CAMERAS), 3)),
        camera_aim=rng.normal(0, 0.04, (len(CAMERAS), 3)),
    )


@dataclass(frozen=True)
class Tool:
    """A tool in a hand.

    Attributes:
        look: of the tool, None for the retractor that every take has.
        kind: the action it is for, or `RETRACTOR`.
        tip: meters, `(3,)`.
        axis: unit vector from the hand to the tip, `(3,)`.
        swing: 0 to 1, where a repeated movement is.
        is_applied: whether the tip is at the patient.
    """

    look: Look | None
    kind: str
    tip: np.ndarray
    axis: np.ndarray
    swing: float
    is_applied: bool


@dataclass(frozen=True)
class Person:
    """Somebody in the room.

    Attributes:
        role: one of `ROLES`.
        position: on the floor, meters, `(2,)`.
        facing: direction they look, radians.
        lean: how far the shoulders are before the feet, meters.
        hands: left and right, meters, `(2, 3)`.
        tool: in the right hand.
    """

    role: str
    position: np.ndarray
    facing: float
    lean: float
    hands: np.ndarray
    tool: Tool | None = None


@dataclass(frozen=True)
class SceneState:
    """Everything that is true of a frame.

    Attributes:
        frame: its number.
        seconds: since the start of the take.
        phase: one of `PHASE_SECONDS`.
        graph: the relations of the frame.
        people: in the room.
        table: center of the operating table on the floor, None while it is outside.
        is_draped: whether the patient is covered but for the knee.
    """

    frame: int
    seconds: float
    phase: str
    graph: SceneGraph
    people: tuple[Person, ...]
    table: np.ndarray | None
    is_draped: bool = False


@dataclass(frozen=True)
class SimulatedTake:
    """A recording: its frames, and what they have in common.

    Attributes:
        number: from 1.
        style: of the take.
        looks: of the tool of each action.
        humans: `human_0` … and the role that 4D-OR's files give them.
        states: one per frame.
    """

    number: int
    style: TakeStyle
    looks: Mapping[str, Look]
    humans: Mapping[str, str]
    states: tuple[SceneState, ...]

    @property
    def name(self) -> str:
        """As label files name it."""
        return f"{self.number:03d}_4DOR"

    def labeled_frames(self) -> list[LabeledFrame]:
        """The labels, with the humans that are in each frame."""
        names = {role: human for human, role in self.humans.items()}
        frames = []
        for state in self.states:
            present = {names[OR4D_ROLES.get(person.role, "none")] for person in state.people}
            humans = {human: self.humans[human] for human in sorted(present)}
            frames.append(LabeledFrame(self.name, state.frame, state.graph, humans))
        return frames


# ---------------------------------------------------------------------------------------------- what happens


@dataclass
class _Script:
    """Who is there and what they do, frame by frame; where they stand follows from it."""

    seconds: np.ndarray
    phases: list[str]
    present: dict[str, np.ndarray]
    relations: list[dict[tuple[str, str], str]]
    tools: list[dict[str, str]]
    ride: np.ndarray  # 0 at the door to 1 at its place; not a number while the table is outside
    draped: int = 0  # first frame with the drape


def _count(rng: np.random.Generator, mean: float) -> int:
    """A whole number with the given mean."""
    return int(mean + rng.random())


def _cut(rng: np.random.Generator, total: int, mean: float) -> list[int]:
    """Cut a number of frames into episodes of a mean length."""
    if total == 0:
        return []
    number = int(np.clip(_count(rng, total / mean), 1, total))
    cuts = np.sort(rng.choice(np.arange(1, total), number - 1, replace=False))
    return np.diff([0, *cuts, total]).tolist()


def _fill(rng: np.random.Generator, mask: np.ndarray, share: float, mean: float, allowed: np.ndarray) -> np.ndarray:
    """Add episodes to `mask` where allowed until it covers a share of its frames."""
    mask, target = mask.copy(), _count(rng, share * len(mask) * rng.uniform(0.85, 1.15))
    while (missing := target - int(mask.sum())) > 0:
        starts = np.flatnonzero(allowed & ~mask)
        if len(starts) == 0:
            break
        start = int(rng.choice(starts))
        stop = start + min(missing, int(rng.geometric(1 / max(mean, 1.0))))
        blocked = np.flatnonzero(~allowed[start:stop])
        mask[start : start + int(blocked[0]) if len(blocked) else stop] = True
    return mask


def _write_script(rng: np.random.Generator, num_frames: int) -> _Script:
    durations = np.array(list(PHASE_SECONDS.values())) * rng.lognormal(0, 0.12, len(PHASE_SECONDS))
    # Every phase has a frame at least, however few frames a take has.
    bounds = np.round(np.cumsum(durations) / durations.sum() * (num_frames - len(durations))).astype(int)
    bounds = np.concatenate([[0], bounds + np.arange(1, len(durations) + 1)])
    step = float(durations.sum() / num_frames)
    script = _Script(
        seconds=np.arange(num_frames) * step,
        phases=[phase for phase, n in zip(PHASE_SECONDS, np.diff(bounds)) for _ in range(n)],
        present={role: np.zeros(num_frames, bool) for role in ROLES},
        relations=[{} for _ in range(num_frames)],
        tools=[{} for _ in range(num_frames)],
        ride=np.full(num_frames, np.nan),
    )
    for phase, start, stop in zip(PHASE_SECONDS, bounds[:-1], bounds[1:]):
        _PhaseWriter(rng, script, phase, int(start), int(stop), step).write()
    # Some of the skin is cleaned before it is covered, some after.
    prepared = script.phases.index("patient_prep")
    first_cut = script.phases.index("knee_prep")
    script.draped = int(rng.integers(prepared + (first_cut - prepared) // 4, first_cut + 1))
    return script


class _PhaseWriter:
    """Writes the frames `start` to `stop` of a script, which are one phase."""

    def __init__(
        self, rng: np.random.Generator, script: _Script, phase: str, start: int, stop: int, step: float
    ) -> None:
        self.rng, self.script, self.phase, self.start, self.step = rng, script, phase, start, step
        self.frames = slice(start, stop)
        self.num_frames = stop - start

    def mean(self, activity: str) -> float:
        return EPISODE_SECONDS[activity] / self.step

    def relate(self, frame: int, role: str, predicate: str, object: str) -> None:
        """`frame` counts from the start of the phase; whoever does something is there."""
        self.script.relations[self.start + frame].setdefault((role, object), predicate)
        self.script.present[role][self.start + frame] = True

    def predicates(self, role: str, object: str, *predicates: str) -> np.ndarray:
        """In which frames of the phase the role has a relation with the object, `(frames,)`."""
        found = [relations.get((role, object)) for relations in self.script.relations[self.frames]]
        return np.array([p is not None and (not predicates or p in predicates) for p in found], bool)

    def write(self) -> None:
        self.write_staff()
        self.write_ride()
        self.write_actions()
        self.write_preparing()
        self.write_holding()
        for role, share in TOUCHING_SHARES.get(self.phase, {}).items():
            allowed = self.script.present[role][self.frames] & ~self.predicates(role, PATIENT)
            mask = _fill(self.rng, ~allowed & False, share, self.mean("touching"), allowed)
            for frame in np.flatnonzero(mask):
                self.relate(frame, role, "touching", PATIENT)
        if self.phase in ASSISTING_SHARES:
            both = self.script.present[ASSISTANT][self.frames] & self.script.present[HEAD_SURGEON][self.frames]
            allowed = (
                both & ~self.predicates(ASSISTANT, INSTRUMENT_TABLE) & ~self.predicates(ASSISTANT, PATIENT, *ACTIONS)
            )
            allowed &= ~self.predicates(HEAD_SURGEON, INSTRUMENT_TABLE)
            share = ASSISTING_SHARES[self.phase]
            for frame in np.flatnonzero(_fill(self.rng, ~both & False, share, self.mean("assisting"), allowed)):
                self.relate(frame, ASSISTANT, "assisting", HEAD_SURGEON)

    def write_staff(self) -> None:
        probabilities, groups = STAFF[self.phase]
        order = [role for group in groups for role in self.rng.permutation(group).tolist()]
        # The fifth, who has no name in the labels, joins the circulator.
        order += [role for role in ROLES if role not in order]
        frame = 0
        while frame < self.num_frames:
            stop = frame + max(1, _count(self.rng, self.rng.gamma(2, STAFF_SECONDS / 2) / self.step))
            for role in order[: self.rng.choice(len(probabilities), p=probabilities)]:
                self.script.present[role][self.frames][frame:stop] = True
            frame = stop

    def write_ride(self) -> None:
        progress = self.script.ride[self.frames]
        if self.phase in WITH_PATIENT:
            progress[:] = 1.0
        visible = max(1, round(SHARE_OF_ROLL_OUT * self.num_frames))
        if self.phase == "roll_out":
            progress[:visible] = 1.0
        if self.phase not in MANIPULATING_SHARES:
            return
        pushed = min(visible, max(1, _count(self.rng, MANIPULATING_SHARES[self.phase] * self.num_frames)))
        at_end = self.phase == "roll_out"
        first = visible - pushed if at_end else 0
        for index in range(pushed):
            part = (index + 1) / (pushed + 1)
            progress[first + index] = 1 - part if at_end else part
            pair = self.rng.permutation((CIRCULATOR, ANAESTHETIST)).tolist()
            for role in pair[: 1 + int(self.rng.random() < SHARE_PREPARING_TOGETHER)]:
                self.relate(first + index, role, "manipulating", TABLE)

    def write_actions(self) -> None:
        episodes: list[tuple[str, int]] = []
        for index, (action, share) in enumerate(ACTION_SHARES.get(self.phase, {}).items()):
            total = max(1, _count(self.rng, share * self.num_frames * self.rng.uniform(0.85, 1.15)))
            cut = [(action, length) for length in _cut(self.rng, total, self.mean(action))]
            if index == 0 and self.phase != "patient_prep":
                first = cut
            else:
                episodes += cut
        if self.phase in ACTION_SHARES:
            episodes = [episodes[index] for index in self.rng.permutation(len(episodes))]
            if self.phase != "patient_prep":
                episodes = first + episodes
        free = self.num_frames - sum(length for _, length in episodes)
        while free < 0:  # only where a phase has hardly more frames than actions
            longest = max(range(len(episodes)), key=lambda index: episodes[index][1])
            episodes[longest] = (episodes[longest][0], episodes[longest][1] - 1)
            free += 1
        gaps = self.rng.multinomial(free, self.rng.dirichlet(np.ones(len(episodes) + 1)))
        frame = 0
        for gap, (action, length) in zip(gaps, episodes):
            frame += gap
            roles = (HEAD_SURGEON,)
            if action == "cleaning":
                roles = tuple(self.rng.permutation((HEAD_SURGEON, ASSISTANT)).tolist())
                roles = roles[: 1 + int(self.rng.random() < SHARE_CLEANING_TOGETHER)]
            for _ in range(length):
                for role in roles:
                    self.relate(frame, role, action, PATIENT)
                    self.relate(frame, role, "holding", INSTRUMENT)
                    self.script.tools[self.start + frame][role] = action
                frame += 1

    def write_preparing(self) -> None:
        if self.phase not in PREPARING_SHARES:
            return
        acting = self.predicates(HEAD_SURGEON, PATIENT) | self.predicates(ASSISTANT, PATIENT)
        mask = _fill(self.rng, acting & False, PREPARING_SHARES[self.phase], self.mean("preparing"), ~acting)
        crew: list[tuple[str, str]] = []
        for frame in range(self.num_frames):
            if not mask[frame]:
                crew = []
                continue
            if not crew:
                roles = [role for role in ROLES[:4] if self.script.present[role][self.start + frame]]
                roles = self.rng.permutation(roles or [ASSISTANT]).tolist()
                roles = roles[: 1 + int(self.rng.random() < SHARE_PREPARING_TOGETHER)]
                crew = [(role, PATIENT if self.rng.random() < 0.65 else INSTRUMENT_TABLE) for role in roles]
            for role, object in crew:
                self.relate(frame, role, "preparing", object)

    def write_holding(self) -> None:
        # Around an action its tool is in the hand already, and still for a while.
        reach = max(1, round(8.0 / self.step))
        for role, share in HOLDING_SHARES.get(self.phase, {}).items():
            held = self.predicates(role, INSTRUMENT)
            allowed = self.script.present[role][self.frames] & ~self.predicates(role, INSTRUMENT_TABLE)
            mask = _fill(self.rng, held, share, self.mean("holding"), allowed | held)
            acting = np.flatnonzero(held)
            for frame in np.flatnonzero(mask & ~held):
                self.relate(frame, role, "holding", INSTRUMENT)
                near = acting[np.abs(acting - frame) <= reach]
                tool = RETRACTOR
                if len(near):
                    nearest = int(near[np.argmin(np.abs(near - frame))])
                    tool = self.script.tools[self.start + nearest][role]
                self.script.tools[self.start + frame][role] = tool


# ---------------------------------------------------------------------------------------------- where everything is


def _rectangle_distance(point: np.ndarray, rectangle: tuple[float, float, float, float]) -> float:
    """Meters from a point on the floor to a rectangle (center x, y, half sizes); 0 inside."""
    outside_x = max(abs(point[0] - rectangle[0]) - rectangle[2], 0.0)
    outside_y = max(abs(point[1] - rectangle[1]) - rectangle[3], 0.0)
    return math.hypot(outside_x, outside_y)


def _gap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    """Meters between two rectangles."""
    return _rectangle_distance(np.array(a[:2]), (b[0], b[1], a[2] + b[2], a[3] + b[3]))


def close_pairs(people: Mapping[str, np.ndarray], rectangles: Mapping[str, tuple[float, ...]]) -> set[tuple[str, str]]:
    """Who or what is closer than `CLOSE_DISTANCE` to whom, each pair once.

    Args:
        people: place on the floor by role.
        rectangles: center x, y and half sizes by name; a person's distance is to the edge.
    """
    names, places = list(people), list(people.values())
    pairs = set()
    for index, (name, place) in enumerate(people.items()):
        others = zip(names[index + 1 :], places[index + 1 :])
        pairs |= {(name, other) for other, where in others if math.dist(place, where) < CLOSE_DISTANCE}
        pairs |= {(name, o) for o, shape in rectangles.items() if _rectangle_distance(place, shape) < CLOSE_DISTANCE}
    things = list(rectangles)
    for index, thing in enumerate(things):
        others = (other for other in things[index + 1 :] if {thing, other} != {PATIENT, TABLE})
        pairs |= {(thing, other) for other in others if _gap(rectangles[thing], rectangles[other]) < CLOSE_DISTANCE}
    return pairs


def _graph(
    relations: Mapping[tuple[str, str], str], people: Mapping[str, np.ndarray], rectangles: Mapping[str, tuple]
) -> SceneGraph:
    """The relations of a frame: what is done, and for every other pair whether it is close."""
    pairs = dict(relations)
    if TABLE in rectangles:
        pairs[PATIENT, TABLE] = "lyingOn"
    for first, second in sorted(close_pairs(people, rectangles)):
        first, second = (UNNAMED_ROLE if name == VISITOR else name for name in (first, second))
        if first != second and (first, second) not in pairs and (second, first) not in pairs:
            pairs[first, second] = "closeTo"
    graph = SceneGraph({Triplet(subject, predicate, object) for (subject, object), predicate in pairs.items()})
    return forward_relations(mirrored_relations(graph))


class _Director:
    """Puts people and hands of one take where its script needs them."""

    def __init__(self, rng: np.random.Generator, style: TakeStyle, looks: Mapping[str, Look], script: _Script) -> None:
        self.rng, self.style, self.looks, self.script = rng, style, looks, script
        self.step = float(script.seconds[1] - script.seconds[0])
        self.places: dict[str, np.ndarray] = {}
        self.stations: dict[str, tuple[str, int]] = {}
        self.offsets: dict[str, np.ndarray] = {}
        self.doing: dict[str, tuple] = {}
        self.angles: dict[str, float] = {}
        self.leans: dict[str, float] = {}

    def states(self) -> tuple[SceneState, ...]:
        return tuple(self.state(frame) for frame in range(len(self.script.phases)))

    def state(self, frame: int) -> SceneState:
        script, ride = self.script, self.script.ride[frame]
        table = None if np.isnan(ride) else DOOR + (TABLE_CENTER - DOOR) * ride
        relations, phase = script.relations[frame], script.phases[frame]
        roles = [role for role in ROLES if script.present[role][frame]]
        for role in set(self.places) - set(roles):  # who comes back enters afresh
            del self.places[role]
            self.stations.pop(role, None)
        for role in roles:
            self.walk(role, phase, relations, table)
        self.separate(roles, relations)
        people = tuple(self.person(role, frame, relations, table) for role in roles)
        rectangles = dict(self.style.rectangles)
        if table is not None:
            rectangles[TABLE] = (*table, *TABLE_HALF)
            rectangles[PATIENT] = (*table, *PATIENT_HALF)
        graph = _graph(relations, {person.role: person.position for person in people}, rectangles)
        return SceneState(
            frame=frame,
            seconds=float(script.seconds[frame]),
            phase=phase,
            graph=graph,
            people=people,
            table=table,
            is_draped=frame >= script.draped and phase != "roll_out",
        )

    def station(self, role: str, phase: str, relations: Mapping[tuple[str, str], str], has_table: bool) -> str:
        """The name of the place where a role's relations put it, or where it idles for a while."""
        at_patient = relations.get((role, PATIENT))
        if (role, TABLE) in relations:
            return "push"
        if at_patient is not None:
            return "knee" if at_patient in ACTIONS else at_patient
        if (role, INSTRUMENT_TABLE) in relations:
            return INSTRUMENT_TABLE
        if (role, HEAD_SURGEON) in relations:
            return "knee"
        name, left = self.stations.get(role, ("", 0))
        if left > 0 and (has_table or name != "knee"):
            self.stations[role] = (name, left - 1)
            return name
        choices = {
            HEAD_SURGEON: {"knee": 0.45, INSTRUMENT_TABLE: 0.3, "free": 0.25},
            ASSISTANT: {"knee": 0.4, INSTRUMENT_TABLE: 0.35, "free": 0.25},
            CIRCULATOR: {INSTRUMENT_TABLE: 0.3, SECONDARY_TABLE: 0.35, "free": 0.35},
            ANAESTHETIST: {MACHINE: 0.75, "free": 0.25},
            VISITOR: {"free": 1.0},
        }[role]
        if phase in ("knee_prep", "knee_insert") and role in (HEAD_SURGEON, ASSISTANT):
            choices = {"knee": 0.88, INSTRUMENT_TABLE: 0.12}
        if not has_table:
            choices.pop("knee", None)
        weights = np.array(list(choices.values()))
        name = str(self.rng.choice(list(choices), p=weights / weights.sum()))
        self.stations[role] = (name, _count(self.rng, self.rng.gamma(2, 12.0) / self.step))
        return name

    def target(self, role: str, station: str, table: np.ndarray | None) -> np.ndarray:
        """Where on the floor a station is for a role."""
        side = self.style.side * (1 if role in (ASSISTANT, CIRCULATOR) else -1)
        center = TABLE_CENTER if table is None else table
        if station == "push":
            return center + (np.array([1.32, 0.0]) if role == CIRCULATOR else np.array([-1.32, 0.0]))
        if station in ("knee", "touching", "preparing"):
            along = {"knee": 0.42, "touching": 0.62, "preparing": 0.12}[station]
            if role == ANAESTHETIST:
                return center + np.array([-1.05, -side * 0.62 if station == "preparing" else side * 0.62])
            if role == CIRCULATOR:
                return center + np.array([-0.3, side * 0.68])
            return center + np.array([along, side * 0.6])
        if station == "free":
            return np.array([4.7 if role in (CIRCULATOR, VISITOR) else 1.4, 0.55 if side < 0 else 4.45])
        x, y, half_x, half_y = self.style.rectangles[station]
        if station == INSTRUMENT_TABLE:
            # From the side of the operating table; the circulator comes from behind.
            toward = math.copysign(1.0, TABLE_CENTER[1] - y) * (-1 if role == CIRCULATOR else 1)
            return np.array([x + (0.25 if role == HEAD_SURGEON else -0.25), y + toward * (half_y + 0.3)])
        return np.array([x - half_x - 0.3, y])

    def walk(self, role: str, phase: str, relations: Mapping, table: np.ndarray | None) -> None:
        doing = tuple(
            sorted((object, predicate) for (subject, object), predicate in relations.items() if subject == role)
        )
        station = self.station(role, phase, relations, table is not None)
        if self.doing.get(role) != (station, doing):
            # A new way to stand and to hold for each thing that is done.
            self.doing[role] = (station, doing)
            spread = (0.10, 0.03) if station in ("knee", "touching", "preparing", "push") else (0.18, 0.10)
            self.offsets[role] = self.rng.normal(0, spread)
            self.angles[role] = float(self.rng.uniform(-0.8, 0.8))
            self.leans[role] = float(self.rng.uniform(0.10, 0.30))
        goal = self.target(role, station, table) + self.offsets[role] + self.rng.normal(0, 0.015, 2)
        place = self.places.get(role)
        if place is not None and not doing:
            move = goal - place
            distance = float(np.linalg.norm(move))
            goal = place + move * min(1.0, SPEED * self.step / max(distance, 1e-6))
        self.places[role] = np.clip(
            goal, 0.25, (ROOM[0] - 0.25 if table is None or table[0] < 4 else 8.0, ROOM[1] - 0.25)
        )

    def separate(self, roles: Sequence[str], relations: Mapping) -> None:
        """Nobody stands inside another: who does nothing, else who comes later in the list, steps aside."""
        busy = {subject for subject, _ in relations}
        ordered = sorted(roles, key=lambda role: (role not in busy, ROLES.index(role)))
        for index, role in enumerate(ordered):
            for other in ordered[:index]:
                apart = self.places[role] - self.places[other]
                distance = float(np.linalg.norm(apart))
                if distance < 0.45:
                    direction = np.array([-1.0 if apart[0] < 0 else 1.0, 0.0])
                    self.places[role] = self.places[role] + direction * (0.45 - distance)

    def person(self, role: str, frame: int, relations: Mapping, table: np.ndarray | None) -> Person:
        place, (station, _) = self.places[role], self.doing[role]
        center = TABLE_CENTER if table is None else table
        knee = np.array([*center, 0.0]) + KNEE
        focus = {
            "knee": knee,
            "touching": knee + (0.32, 0.0, -0.1),
            "preparing": knee + (-0.3, 0.0, 0.0),
            "push": np.array([*center, 1.0]),
            "free": np.array([*TABLE_CENTER, 1.0]),
        }.get(station)
        if focus is None:
            x, y, *_ = self.style.rectangles[station]
            focus = np.array([x, y, 1.0])
        if role in (ANAESTHETIST, CIRCULATOR) and station in ("touching", "preparing"):
            focus = np.array([*center, 1.1]) + (-0.75 if role == ANAESTHETIST else -0.25, 0.0, 0.0)
        facing = math.atan2(focus[1] - place[1], focus[0] - place[0])
        forward = np.array([math.cos(facing), math.sin(facing), 0.0])
        across = np.array([-forward[1], forward[0], 0.0])
        body = np.array([*place, 0.0])
        lean = self.leans[role] * (1.0 if station not in ("free", MACHINE, SECONDARY_TABLE) else 0.2)
        jitter = self.rng.normal(0, 0.015, (2, 3))
        hands = np.stack([body + forward * 0.25 + across * 0.17, body + forward * 0.25 - across * 0.17])
        hands[:, 2] = 1.02
        predicate = relations.get((role, PATIENT))
        if predicate in ("touching", "preparing"):
            hands = np.stack([focus + across * 0.12, focus - across * 0.12]) - forward * 0.06
            hands[:, 2] = 1.16
            if predicate == "touching":  # one hand, the other is free
                hands[1] = body + forward * 0.3 - across * 0.2 + (0.0, 0.0, 1.1)
        elif station in ("push", INSTRUMENT_TABLE):
            hands = np.stack([body + forward * 0.5 + across * 0.15, body + forward * 0.5 - across * 0.15])
            hands[:, 2] = 0.98
        elif station == "knee":
            hands[0] = body + forward * 0.42 + across * 0.14 + (0.0, 0.0, 1.14)
        tool = self.tool(role, frame, predicate, knee, body, forward, across)
        if tool is not None:
            hands[1] = tool.tip - tool.axis * 0.27
        if (role, HEAD_SURGEON) in relations and HEAD_SURGEON in self.places:
            surgeon = np.array([*self.places[HEAD_SURGEON], 1.2])
            hands[0] = body * 0.42 + surgeon * 0.58
            hands[0][0] += 0.22
            hands[0][2] = 1.24
        if predicate in ACTIONS:
            # The other hand steadies the leg, or what the tool works on.
            apart = {"hammering": (0.02, 0.02, 0.19), "suturing": (0.11, 0.03, 0.15)}.get(
                predicate, (0.17, 0.03, 0.03)
            )
            hands[0] = knee + across * apart[0] - forward * apart[1] + (0.0, 0.0, apart[2])
        return Person(role, place, facing, lean, hands + jitter, tool)

    def tool(
        self,
        role: str,
        frame: int,
        predicate: str | None,
        knee: np.ndarray,
        body: np.ndarray,
        forward: np.ndarray,
        across: np.ndarray,
    ) -> Tool | None:
        """What is in the right hand: at the knee in an action, else in front of the chest."""
        kind = self.script.tools[frame].get(role)
        if kind is None:
            return None
        swing = float(self.rng.random())
        turn = self.angles[role] + self.rng.normal(0, 0.08)
        if predicate in ACTIONS:
            direction = forward * math.cos(turn - 0.35) + across * math.sin(turn - 0.35) * -1.0
            tilt = 0.15 if kind == "hammering" else 0.35
            tip = knee + across * self.rng.normal(0.0, 0.02) + (0.0, 0.0, 0.05)
            if kind == "hammering":
                tip = tip + (0.0, 0.0, 0.12 + 0.12 * swing)
            if kind == "suturing":
                tip = tip + (0.0, 0.0, 0.02 + 0.08 * swing)
        else:
            direction = forward * math.cos(turn) + across * (0.55 + math.sin(turn))
            tilt = -0.25
            # Off the knee: over the edge of the table or before the chest.
            tip = body + forward * 0.36 - across * 0.16 + (0.0, 0.0, 1.32)
        axis = direction / np.linalg.norm(direction) * math.cos(tilt)
        axis[2] = -math.sin(tilt)
        return Tool(self.looks.get(kind), kind, tip, axis, swing, predicate in ACTIONS)


def make_take(config: SimulatorConfig, study: Study, number: int) -> SimulatedTake:
    """Simulate the recording of a number; it depends on the seed and the number only, not on other takes."""
    rng = np.random.default_rng(derive_seed(config.seed, 2, number))
    style = _draw_style(rng)
    script = _write_script(rng, config.frames_per_take)
    roles = [OR4D_ROLES.get(role, "none") for role in rng.permutation(ROLES).tolist()]
    humans = {f"human_{index}": role for index, role in enumerate(roles)}
    looks = study.looks[number]
    return SimulatedTake(number, style, looks, humans, _Director(rng, style, looks, script).states())
