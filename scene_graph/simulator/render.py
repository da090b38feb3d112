"""Pictures of a simulated operating room: pinhole cameras, flat shaded shapes, the nearer over the farther.

Bodies, limbs and tools are tapered capsules, whose outline in a picture is the hull of two circles; tables are boxes.
All shapes of a frame are projected for all cameras at once, sorted, and filled on a canvas four times as large as the
picture. Every camera hangs above every head, so a ray to something above a height never passes below it: shapes are
sorted by layers of height first and by distance only within a layer, which orders tables, people beside them and arms
over them rightly where a sort by distance alone would not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from scene_graph.simulator.world import (
    ACTIONS,
    ASSISTANT,
    DOOR,
    HEAD_SURGEON,
    HUES,
    INSTRUMENT_TABLE,
    KNEE,
    MACHINE,
    ROOM,
    SECONDARY_TABLE,
    TABLE_CENTER,
    TABLE_HALF,
    TABLE_HEIGHT,
    Person,
    SceneState,
    SimulatedTake,
    Tool,
)
from vidgen.runtime.device import derive_seed

SUPERSAMPLING = 4
# Points on the round ends of a capsule.
ARC = np.linspace(0.0, 1.0, 7)
# Layers of height: shadows on the floor, up to the table top, what lies on tables, marks on it, all above.
FLOOR, LOW, MIDDLE, MARKS, HIGH = range(5)
LIGHT = (-0.35, -0.45, 0.82)
NEAR = 0.15
NOWHERE = (math.nan, math.nan, math.nan)
# Meters from the tip of a tool to its body, the width of the dark line around each part, and how much smaller tips are
# drawn than they are written down below: small enough that what catches the eye is the body, which names no action.
TIP, RIM, TIP_SCALE = 0.16, 0.005, 0.68
# Shift of the lighter part of a capsule, in radii.
TOWARD_LIGHT = np.array([-0.20, -0.25])
NUM_GRAINS = 8
GRAIN = 2.5

STEEL, DARK_STEEL, BONE, BLOOD, CEMENT = (
    (222, 228, 234),
    (96, 104, 114),
    (206, 176, 128),
    (140, 22, 26),
    (176, 196, 168),
)
IODINE, THREAD, PAD, DARK = (176, 96, 36), (28, 36, 120), (250, 248, 236), (44, 46, 52)

# Position and aim of cameras 1 to 6, meters, and their field of view, degrees. Camera 2 looks at the knee from the
# feet, as the one of 4D-OR that shows most; y is measured from the head surgeon's side to the other.
_CAMERAS = (
    ((0.35, -2.1, 2.75), (3.3, 0.0, 0.85), 50.0),
    ((4.02, 0.0, 2.40), (3.42, 0.0, 1.14), 36.0),
    ((5.75, -2.1, 2.75), (3.0, 0.05, 0.85), 50.0),
    ((0.35, 2.1, 2.75), (3.3, 0.0, 0.85), 50.0),
    ((5.75, 2.1, 2.75), (3.0, -0.05, 0.85), 50.0),
    ((2.2, 0.0, 2.9), (3.2, 0.0, 0.8), 84.0),
)


class _Shapes:
    """Capsules and polygons of one frame.

    Attributes:
        anchor: while set, shapes are as far from a camera as this point, so that the parts of one thing stay together
            and cover each other in the order in which they are added.
    """

    def __init__(self) -> None:
        self.anchor: np.ndarray | None = None
        self.ends: list = []  # two points of each capsule
        self.capsules: list[tuple] = []  # radii at the ends, RGB, layer, whether it is shaded, order, anchor
        self.points: list = []  # of all polygons
        self.polygons: list[tuple] = []  # number of points, RGB, layer, order, anchor
        self._count = 0

    def copy(self) -> _Shapes:
        """More can be added to a copy."""
        other = _Shapes()
        other.ends, other.capsules = list(self.ends), list(self.capsules)
        other.points, other.polygons, other._count = list(self.points), list(self.polygons), self._count
        return other

    def _order(self) -> tuple[float, ...]:
        self._count += 1
        return (self._count, *(NOWHERE if self.anchor is None else self.anchor))

    def capsule(self, start, end, radius_start, radius_end, color, layer, is_shaded=True) -> None:
        """Two balls and what is between them."""
        self.ends += (start, end)
        self.capsules.append((radius_start, radius_end, *color, layer, is_shaded, *self._order()))

    def ball(self, center, radius, color, layer, is_shaded=True) -> None:
        self.capsule(center, center, radius, radius, color, layer, is_shaded)

    def polygon(self, points, color, layer) -> None:
        """A flat shape seen from both sides."""
        self.points += points
        self.polygons.append((len(points), *color, layer, *self._order()))

    def box(self, center, half, low, high, color, layer, pieces=1) -> None:
        """A box on the floor plan; long ones in pieces, so that each can be before or behind a person."""
        x0, y0, length = center[0] - half[0], center[1], 2 * half[0] / pieces
        for piece in range(pieces):
            a, b, c, d = x0 + piece * length, x0 + (piece + 1) * length, y0 - half[1], y0 + half[1]
            self._face([(a, c, high), (b, c, high), (b, d, high), (a, d, high)], color, (0, 0, 1), layer)
            self._face([(a, c, low), (b, c, low), (b, c, high), (a, c, high)], color, (0, -1, 0), layer)
            self._face([(a, d, low), (b, d, low), (b, d, high), (a, d, high)], color, (0, 1, 0), layer)
            if piece == 0:
                self._face([(a, c, low), (a, d, low), (a, d, high), (a, c, high)], color, (-1, 0, 0), layer)
            if piece == pieces - 1:
                self._face([(b, c, low), (b, d, low), (b, d, high), (b, c, high)], color, (1, 0, 0), layer)

    def _face(self, points, color, normal, layer) -> None:
        shade = 0.62 + 0.38 * max(0.0, sum(n * light for n, light in zip(normal, LIGHT)))
        self.polygon(points, _scaled(color, shade), layer)


@lru_cache(maxsize=4096)
def _scaled(color: tuple[int, int, int], factor: float) -> tuple[int, int, int]:
    return tuple(min(255, int(channel * factor)) for channel in color)


# ---------------------------------------------------------------------------------------------- things and people


def _add_furniture(shapes: _Shapes, take: SimulatedTake) -> None:
    style, colors = take.style, take.style.colors
    for name in (INSTRUMENT_TABLE, SECONDARY_TABLE):
        x, y, half_x, half_y = style.rectangles[name]
        for dx in (-0.9, 0.9):
            for dy in (-0.8, 0.8):
                foot = np.array([x + dx * half_x, y + dy * half_y, 0.0])
                shapes.capsule(foot, foot + (0, 0, 0.8), 0.025, 0.025, DARK_STEEL, LOW, False)
        cloth = colors["cloth"] if name == INSTRUMENT_TABLE else (186, 190, 192)
        shapes.box((x, y), (half_x, half_y), 0.62 if name == INSTRUMENT_TABLE else 0.8, 0.86, cloth, LOW, pieces=2)
    x, y, half_x, half_y = style.rectangles[SECONDARY_TABLE]
    shapes.box((x - 0.1, y), (0.14, 0.12), 0.86, 0.98, (204, 212, 214), MIDDLE)
    shapes.ball(np.array([x + 0.2, y + 0.08, 0.9]), 0.07, (170, 178, 186), MIDDLE)
    x, y, half_x, half_y = style.rectangles[MACHINE]
    shapes.box((x, y), (half_x, half_y), 0.05, 0.86, colors["machine"], LOW)
    shapes.box((x, y), (half_x * 0.9, half_y * 0.9), 0.86, 1.12, _scaled(colors["machine"], 0.94), MIDDLE)
    shapes.box((x, y), (half_x * 0.4, half_y * 0.8), 1.14, 1.46, (58, 62, 70), HIGH)
    screen = x + half_x * 0.4 + 0.004
    corners = [(screen, y + u * half_y * 0.68, z) for u, z in ((-1, 1.19), (1, 1.19), (1, 1.42), (-1, 1.42))]
    shapes.polygon(corners, (40, 120, 96), HIGH)


def _add_table_tools(shapes: _Shapes, take: SimulatedTake, state: SceneState) -> None:
    """The tools that nobody holds lie on the instrument table."""
    x, y, _, half_y = take.style.rectangles[INSTRUMENT_TABLE]
    used = {person.tool.kind for person in state.people if person.tool is not None}
    for index, action in enumerate(ACTIONS):
        if action in used or state.phase in ("cleanup", "roll_out"):
            continue
        place = np.array([x + (index - 3) * 0.15, y, 0.885])
        reach = np.array([0.02, half_y * 0.6, 0.0])
        shapes.capsule(place - reach, place, 0.022, 0.022, HUES[take.looks[action].hue], MIDDLE, False)
        shapes.capsule(place, place + reach, 0.011, 0.011, STEEL, MIDDLE, False)


def _add_patient(shapes: _Shapes, take: SimulatedTake, state: SceneState) -> None:
    colors = take.style.colors
    x, y = state.table
    shapes.box((x, y), (0.32, 0.18), 0.0, 0.7, (118, 124, 130), LOW)
    shapes.box((x, y), TABLE_HALF, 0.74, TABLE_HEIGHT, (74, 84, 92), LOW, pieces=5)
    skin, gown = colors["skin"], (206, 216, 224)
    cover = colors["drape"] if state.is_draped else gown

    def at(along: float, across: float, height: float) -> np.ndarray:
        return np.array([x + along, y + across, height])

    shapes.ball(at(-0.98, 0, 0.9), 0.12, (232, 234, 236), MIDDLE)
    shapes.ball(at(-0.82, 0, 1.0), 0.11, skin, MIDDLE)
    shapes.ball(at(-0.88, 0, 1.02), 0.10, (150, 190, 200), MIDDLE)
    for across in (-0.24, 0.24):
        shapes.capsule(at(-0.5, across, 0.94), at(-0.05, across, 0.92), 0.05, 0.04, skin, MIDDLE)
    shapes.capsule(at(-0.52, 0, 0.98), at(-0.12, 0, 0.98), 0.19, 0.18, cover, MIDDLE)
    if state.is_draped:
        corners = ((-0.3, -0.36), (0.98, -0.36), (0.98, 0.36), (-0.3, 0.36))
        shapes.polygon([at(*corner, 0.90) for corner in corners], _scaled(cover, 0.86), MIDDLE)
        # The drape between the head and the operation.
        hung = [at(-0.45, -0.42, 0.95), at(-0.45, 0.42, 0.95), at(-0.5, 0.42, 1.26), at(-0.5, -0.42, 1.26)]
        shapes.polygon(hung, _scaled(cover, 0.94), HIGH)
    knee = at(KNEE[0], KNEE[1], KNEE[2] - 0.07)
    other = -take.style.side * 0.14 * -1
    shapes.capsule(
        at(-0.05, other, 0.97), at(0.9, other, 0.94), 0.09, 0.06, cover if state.is_draped else skin, MIDDLE
    )
    shapes.capsule(at(-0.05, -other * 0.4, 1.0), knee, 0.115, 0.09, cover if state.is_draped else skin, MIDDLE)
    shapes.capsule(knee, at(0.88, 0.0, 0.97), 0.085, 0.055, cover if state.is_draped else skin, MIDDLE)
    if state.is_draped:
        shapes.capsule(knee - (0.15, 0, 0.012), knee, 0.100, 0.098, skin, MARKS)
        shapes.capsule(knee, knee + (0.19, 0, 0.03 - 0.06), 0.098, 0.082, skin, MARKS)
        # The wound looks the same throughout, or it would name the actions that come before and after others.
        top = knee + (0.0, 0.0, 0.1)
        shapes.capsule(top + (-0.07, 0, -0.02), top + (0.07, 0, -0.02), 0.06, 0.055, IODINE, MARKS, False)
        shapes.capsule(top + (-0.1, 0, 0), top + (0.1, 0, -0.01), 0.020, 0.020, BLOOD, MARKS, False)
        shapes.capsule(top + (-0.05, 0, 0), top + (0.05, 0, 0), 0.011, 0.011, BONE, MARKS, False)


def _add_person(shapes: _Shapes, take: SimulatedTake, person: Person) -> None:
    colors = take.style.colors
    sterile = person.role in (HEAD_SURGEON, ASSISTANT)
    cloth = colors["gown"] if sterile else colors["scrubs"]
    forward = np.array([math.cos(person.facing), math.sin(person.facing), 0.0])
    across = np.array([-forward[1], forward[0], 0.0])
    feet = np.array([*person.position, 0.0])
    shapes.polygon(
        [feet + (0.27 * math.cos(a) + 0.08, 0.27 * math.sin(a) + 0.08, 0.002) for a in np.linspace(0, 6.283, 9)[:-1]],
        _scaled(colors["floor"], 0.72),
        FLOOR,
    )
    hips = feet + (0, 0, 0.9)
    for offset in (-0.1, 0.1):
        shapes.capsule(
            feet + across * offset + (0, 0, 0.06), hips + across * offset * 0.9, 0.075, 0.11, _scaled(cloth, 0.8), LOW
        )
    waist = hips + forward * person.lean * 0.35 + (0, 0, 0.2)
    shapes.capsule(hips, waist, 0.19, 0.18, _scaled(cloth, 0.92), MIDDLE)
    shoulders = feet + forward * person.lean + (0, 0, 1.42)
    shapes.capsule(waist, shoulders, 0.17, 0.15, cloth, HIGH)
    shapes.capsule(shoulders - across * 0.16, shoulders + across * 0.16, 0.09, 0.09, cloth, HIGH)
    for hand, sign in zip(person.hands, (1.0, -1.0)):
        shoulder = shoulders + across * sign * 0.2
        elbow = (shoulder + hand) / 2 + across * sign * 0.07 + (0, 0, -0.1)
        shapes.capsule(shoulder, elbow, 0.065, 0.055, _scaled(cloth, 1.05), HIGH)
        shapes.capsule(elbow, hand, 0.052, 0.04, _scaled(cloth, 1.1), HIGH)
        shapes.ball(hand, 0.046, colors["glove"] if sterile else colors["skin"], HIGH)
    head = shoulders + forward * (0.06 + person.lean * 0.25) + (0, 0, 0.24)
    shapes.ball(head, 0.105, colors["skin"], HIGH)
    shapes.ball(head - forward * 0.035 + (0, 0, 0.03), 0.105, colors["cap"], HIGH)
    if sterile:
        shapes.ball(head + forward * 0.06 - (0, 0, 0.04), 0.06, (214, 226, 232), HIGH, False)


# ---------------------------------------------------------------------------------------------- tools


class _ToolPlane:
    """Draws in the plane of a tool: `a` meters back from the tip, `b` meters across."""

    def __init__(self, shapes: _Shapes, tool: Tool, scale: float = 1.0) -> None:
        self.shapes, self.tip, self.axis, self.scale = shapes, tool.tip, tool.axis * scale, scale
        across = np.array([-tool.axis[1], tool.axis[0], 0.0])
        self.across = across / np.linalg.norm(across) * scale

    def at(self, a: float, b: float = 0.0) -> np.ndarray:
        return self.tip - self.axis * a + self.across * b

    def bar(self, start, end, radius, color, end_radius=None, is_shaded=False) -> None:
        ends, radii = (self.at(*start), self.at(*end)), (radius * self.scale, (end_radius or radius) * self.scale)
        self.shapes.capsule(*ends, radii[0] + RIM, radii[1] + RIM, DARK, HIGH, False)
        self.shapes.capsule(*ends, *radii, color, HIGH, is_shaded)

    def sheet(self, points, color) -> None:
        middle = np.mean(points, axis=0)
        rim = [middle + (np.array(p) - middle) * (1 + RIM / math.dist(p, middle)) for p in points]
        self.shapes.polygon([self.at(*point) for point in rim], DARK, HIGH)
        self.shapes.polygon([self.at(*point) for point in points], color, HIGH)

    def blobs(self, places, radii, color) -> None:
        """Balls that have grown together."""
        balls = [(self.at(*place), radius * self.scale) for place, radius in zip(places, radii)]
        for center, radius in balls:
            self.shapes.ball(center, radius + RIM, DARK, HIGH, False)
        for center, radius in balls:
            self.shapes.ball(center, radius, color, HIGH, False)

    def line(self, points, radius, color) -> None:
        """A thread or wire through points in space."""
        for start, end in pairwise(points):
            self.shapes.capsule(start, end, radius * self.scale, radius * self.scale, color, HIGH, False)


def _add_body(plane: _ToolPlane, body: str, color: tuple[int, int, int]) -> None:
    """The part of a tool that its look gives."""
    t = TIP * TIP_SCALE
    if body == "pistol":
        plane.bar((t + 0.13, 0.0), (t + 0.17, 0.14), 0.030, _scaled(color, 0.8))
        plane.bar((t, 0.0), (t + 0.16, 0.0), 0.037, color, is_shaded=True)
    elif body == "rod":
        plane.bar((t, 0.0), (t + 0.26, 0.0), 0.026, color, is_shaded=True)
        plane.bar((t + 0.05, 0.0), (t + 0.08, 0.0), 0.024, DARK)
    elif body == "tee":
        plane.bar((t, 0.0), (t + 0.12, 0.0), 0.018, color)
        plane.bar((t + 0.13, -0.095), (t + 0.13, 0.095), 0.030, color, is_shaded=True)
    elif body == "bulb":
        plane.bar((t + 0.02, 0.0), (t + 0.13, 0.0), 0.034, color, end_radius=0.068, is_shaded=True)
    else:
        for side in (-1.0, 1.0):
            plane.bar((t, 0.0), (t + 0.1, side * 0.04), 0.014, color)
        for side in (-1.0, 1.0):
            plane.bar((t + 0.15, side * 0.06), (t + 0.152, side * 0.06), 0.052, color)
            plane.bar((t + 0.15, side * 0.06), (t + 0.152, side * 0.06), 0.022, DARK)


def _add_tip(plane: _ToolPlane, tool: Tool, other_hand: np.ndarray) -> None:
    """The part of a tool that its action needs, of steel whatever the look."""
    t = TIP
    if tool.kind == "drilling":
        plane.bar((-0.02, 0.0), (t * 0.6, 0.0), 0.011, STEEL)
        for a in np.arange(-0.015, t * 0.55, 0.026):
            plane.line((plane.at(a, -0.012), plane.at(a + 0.014, 0.012)), 0.0045, DARK)
        plane.bar((t * 0.6, 0.0), (t, 0.0), 0.018, DARK_STEEL, end_radius=0.034)
    elif tool.kind == "sawing":
        teeth = [(0.022 * (index % 2) - 0.02, -0.06 + 0.12 * index / 8) for index in range(9)]
        plane.sheet([*teeth, (t * 0.85, 0.030), (t * 0.85, -0.030)], STEEL)
        plane.line((plane.at(t * 0.3), plane.at(t * 0.7)), 0.007, DARK_STEEL)
        plane.bar((t * 0.85, 0.0), (t, 0.0), 0.026, DARK_STEEL)
    elif tool.kind == "hammering":
        plane.bar((0.03, 0.0), (t, 0.0), 0.015, DARK_STEEL)
        plane.bar((0.01, -0.075), (0.01, 0.075), 0.044, STEEL, is_shaded=True)
    elif tool.kind == "cementing":
        plane.bar((0.03, 0.0), (t, 0.0), 0.012, (232, 236, 240), end_radius=0.036)
        plane.blobs(
            ((-0.03, -0.02), (0.0, 0.02), (-0.055, 0.03), (-0.07, -0.015)), (0.036, 0.034, 0.028, 0.022), CEMENT
        )
    elif tool.kind == "suturing":
        plane.bar((0.02, 0.0), (t, 0.0), 0.010, DARK_STEEL, end_radius=0.016)
        arc = [plane.at(0.01 + 0.05 * math.sin(u), 0.045 - 0.065 * math.cos(u)) for u in np.linspace(-0.9, 2.4, 7)]
        plane.line(arc, 0.011, DARK)
        plane.line(arc, 0.007, STEEL)
        if tool.is_applied:
            plane.line((plane.at(-0.10, 0.05), arc[0], other_hand), 0.006, THREAD)
    elif tool.kind == "cutting":
        plane.sheet([(-0.03, 0.014), (0.05, -0.036), (t * 0.7, -0.022), (t * 0.7, 0.018)], STEEL)
        plane.bar((t * 0.7, 0.0), (t, 0.0), 0.014, DARK_STEEL)
    elif tool.kind == "cleaning":
        plane.bar((0.03, 0.0), (t, 0.0), 0.013, DARK_STEEL)
        plane.sheet([(-0.035, -0.065), (-0.035, 0.065), (0.055, 0.065), (0.055, -0.065)], PAD)
        plane.sheet([(-0.035, -0.065), (-0.035, 0.065), (-0.005, 0.065), (-0.005, -0.065)], IODINE)
    else:
        plane.bar((0.0, 0.0), (t, 0.0), 0.012, STEEL)
        plane.bar((0.0, 0.0), (0.03, 0.05), 0.012, STEEL)


def _add_tool(shapes: _Shapes, person: Person) -> None:
    tool = person.tool
    plane = _ToolPlane(shapes, tool)
    shapes.anchor = tool.tip - tool.axis * TIP
    if tool.kind == "hammering" and tool.is_applied:
        # The mallet strikes a rod that the other hand holds on the bone.
        foot = np.array([*tool.tip[:2], 1.16])
        shapes.capsule(foot, person.hands[0] + (0.0, 0.0, 0.06), 0.015, 0.022, DARK_STEEL, HIGH)
    if tool.look is None:
        plane.bar((TIP * TIP_SCALE, 0.0), (TIP + 0.14, 0.0), 0.018, DARK_STEEL)
    else:
        _add_body(plane, tool.look.body, HUES[tool.look.hue])
    _add_tip(_ToolPlane(shapes, tool, TIP_SCALE), tool, person.hands[0])
    shapes.anchor = None


# ---------------------------------------------------------------------------------------------- cameras


def _quaternion(rotation: np.ndarray) -> tuple[float, float, float, float]:
    """x, y, z, w of a rotation matrix; the largest component is computed first, which never divides by zero."""
    trace = np.trace(rotation)
    squares = np.array([*(2 * np.diag(rotation) - trace), trace]) + 1
    largest = int(np.argmax(squares))
    products = np.empty(4)
    for axis in range(3):
        one, two = (axis + 1) % 3, (axis + 2) % 3
        if largest == 3:
            products[axis] = rotation[two, one] - rotation[one, two]
        else:
            products[axis] = rotation[axis, largest] + rotation[largest, axis]
    if largest < 3:
        one, two = (largest + 1) % 3, (largest + 2) % 3
        products[3] = rotation[two, one] - rotation[one, two]
    products[largest] = squares[largest]
    return tuple((products / np.linalg.norm(products)).tolist())


class Renderer:
    """Draws the frames of one take.

    Args:
        take: the recording.
        views: cameras, 1 to 6.
        size: height and width of an image, pixels.
        seed: of the grain of the images.

    Example:
        >>> images = Renderer(take, views=(2, 1), size=64).render(take.states[100])  # uint8 (2, 64, 64, 3)
    """

    def __init__(
        self, take: SimulatedTake, views: Sequence[int] = (2, 1, 3, 5), size: int = 64, seed: int = 0
    ) -> None:
        self.take, self.views, self.size = take, tuple(views), size
        self.canvas = size * SUPERSAMPLING
        poses = [self._pose(view) for view in self.views]
        self.positions = np.stack([position for position, _, _ in poses])
        self.rotations = np.stack([rotation for _, rotation, _ in poses])
        self.focals = np.array([focal for _, _, focal in poses])
        self.backgrounds = [self._background(index) for index in range(len(self.views))]
        self._light = np.float32(take.style.gain) * np.array(take.style.cast, np.float32)
        rng = np.random.default_rng(derive_seed(seed, 3, take.number))
        self._grains = rng.normal(0, GRAIN, (NUM_GRAINS, size, size, 3)).astype(np.float32)
        self._furniture = _Shapes()
        _add_furniture(self._furniture, take)
        self._scene: tuple | None = ()
        self._still = self._furniture

    def _pose(self, view: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Position, rotation (rows right, down, forward) and focal length in pixels of the canvas."""
        position, aim, degrees = _CAMERAS[view - 1]
        mirror = np.array([1.0, self.take.style.side, 1.0])
        middle = np.array([0.0, TABLE_CENTER[1], 0.0])
        position = np.array(position) * mirror + middle + self.take.style.camera_shift[view - 1]
        aim = np.array(aim) * mirror + middle + self.take.style.camera_aim[view - 1]
        forward = (aim - position) / np.linalg.norm(aim - position)
        right = np.cross(forward, (0.0, 0.0, 1.0))
        right /= np.linalg.norm(right)
        rotation = np.stack([right, np.cross(forward, right), forward])
        return position, rotation, self.canvas / 2 / math.tan(math.radians(degrees) / 2)

    def calibration(self, view: int) -> dict[str, Any]:
        """What 4D-OR's `camera02.json` says of a camera: matrices named by column and row, pixels and meters."""
        index, scale = self.views.index(view), 1 / SUPERSAMPLING
        focal, center = self.focals[index] * scale, self.size / 2
        matrix = {"m00": focal, "m11": focal, "m20": center, "m21": center, "m22": 1.0}
        zeros = {f"m{column}{row}": 0.0 for column in range(3) for row in range(3)}
        x, y, z, w = _quaternion(self.rotations[index].T)
        translation = {f"m{row}0": float(value) for row, value in enumerate(self.positions[index])}
        identity = {
            "translation": dict.fromkeys(translation, 0.0),
            "rotation": {"x": 0.0, "y": 0.0, "z": 0.0, "w": 1.0},
        }
        return {
            "value0": {
                "color_parameters": {
                    "width": self.size,
                    "height": self.size,
                    "intrinsics_matrix": {**zeros, **{name: float(value) for name, value in matrix.items()}},
                },
                "camera_pose": {"translation": translation, "rotation": {"x": x, "y": y, "z": z, "w": w}},
                "color2depth_transform": identity,
            }
        }

    def _project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pixels of the canvas `(views, …, 2)` and depths `(views, …)` of points `(…, 3)`."""
        flat = points.reshape(-1, 3)
        local = np.einsum("vij,vpj->vpi", self.rotations, flat[None] - self.positions[:, None])
        depths = np.maximum(local[..., 2], NEAR)
        pixels = local[..., :2] / depths[..., None] * self.focals[:, None, None] + self.canvas / 2
        shape = (len(self.views), *points.shape[:-1])
        return pixels.reshape(*shape, 2), local[..., 2].reshape(shape)

    def _background(self, index: int) -> Image.Image:
        """Walls and floor, which never change."""
        colors = self.take.style.colors
        image = Image.new("RGB", (self.canvas, self.canvas), _scaled(colors["wall"], 0.8))
        draw = ImageDraw.Draw(image)
        width, depth = ROOM
        walls = [((0, 0), (0, depth), 0.84), ((width, depth), (width, 0), 0.88)]
        walls += [((0, depth), (width, depth), 0.96), ((width, 0), (0, 0), 0.92)]
        for start, end, shade in walls:
            self._fill(
                draw, index, [(*start, 0.0), (*end, 0.0), (*end, 2.6), (*start, 2.6)], _scaled(colors["wall"], shade)
            )
            self._fill(
                draw, index, [(*start, 0.0), (*end, 0.0), (*end, 0.1), (*start, 0.1)], _scaled(colors["wall"], 0.6)
            )
        door = [
            (width, DOOR[1] - 0.7, 0.0),
            (width, DOOR[1] + 0.7, 0.0),
            (width, DOOR[1] + 0.7, 2.1),
            (width, DOOR[1] - 0.7, 2.1),
        ]
        self._fill(draw, index, door, (92, 104, 112))
        steps = 12
        for x in range(steps):
            for y in range(steps):
                a, b = ROOM[0] * x / steps, ROOM[1] * y / steps
                c, d = ROOM[0] * (x + 1) / steps, ROOM[1] * (y + 1) / steps
                color = _scaled(colors["floor"], 1.0 if (x + y) % 2 else 0.95)
                self._fill(draw, index, [(a, b, 0.0), (c, b, 0.0), (c, d, 0.0), (a, d, 0.0)], color)
        return image

    def _fill(self, draw: ImageDraw.ImageDraw, index: int, points: Sequence, color: tuple[int, int, int]) -> None:
        """Fill a flat shape in front of a camera."""
        pixels, depths = self._project(np.array(points))
        if depths[index].min() > NEAR:
            draw.polygon(pixels[index].ravel().tolist(), color)

    def _shapes(self, state: SceneState) -> _Shapes:
        scene = (None if state.table is None else tuple(state.table), state.is_draped)
        if self._scene != scene:  # what stays for many frames
            self._scene, self._still = scene, self._furniture.copy()
            if state.table is not None:
                _add_patient(self._still, self.take, state)
        shapes = self._still.copy()
        _add_table_tools(shapes, self.take, state)
        for person in state.people:
            _add_person(shapes, self.take, person)
            if person.tool is not None:
                _add_tool(shapes, person)
        return shapes

    def render(self, state: SceneState) -> np.ndarray:
        """The images of a frame, uint8 `(views, height, width, 3)`, RGB."""
        shapes = self._shapes(state)
        capsules, polygons = self._capsules(shapes), self._polygons(shapes)
        images = []
        for view in range(len(self.views)):
            items = sorted(capsules[view] + polygons[view], key=itemgetter(0))
            image = self.backgrounds[view].copy()
            draw = ImageDraw.Draw(image)
            for _, outline, color, lit in items:
                if lit is None:
                    draw.polygon(outline, color)
                else:
                    draw.polygon(outline, _scaled(color, 0.84))
                    draw.polygon(lit, _scaled(color, 1.06))
            images.append(self._develop(image, state.frame, view))
        return np.stack(images)

    def _keys(self, rows: np.ndarray, centers: np.ndarray) -> list[list[tuple]]:
        """What shapes of each view are sorted by; `rows` end with layer, …, order and anchor."""
        centers = np.where(np.isnan(rows[:, -3:]), centers, rows[:, -3:])
        distances = np.linalg.norm(centers - self.positions[:, None], axis=-1)
        layers, orders = rows[:, 5].tolist(), rows[:, -4].tolist()
        return [list(zip(layers, negative, orders)) for negative in (-distances).tolist()]

    def _capsules(self, shapes: _Shapes) -> list[list[tuple]]:
        """Key, outline, color and lighter part of the capsules that each view shows."""
        ends, rows = np.array(shapes.ends).reshape(-1, 2, 3), np.array(shapes.capsules)
        pixels, depths = self._project(ends)  # (views, capsules, 2 ends, 2)
        radii = rows[:, :2] * self.focals[:, None, None] / np.maximum(depths, NEAR)
        directions = self._directions(pixels, radii)
        pixels, spans = np.repeat(pixels, len(ARC), axis=2), np.repeat(radii, len(ARC), axis=2)[..., None]
        outlines = pixels + spans * directions
        # The lighter side: the same shape, thinner and moved towards the light.
        lit = pixels + spans * (0.6 * directions + TOWARD_LIGHT)
        low, high = outlines.min(axis=2), outlines.max(axis=2)
        seen = (depths.min(axis=2) > NEAR) & (high > 0).all(axis=2) & (low < self.canvas).all(axis=2)
        is_lit = (rows[:, 6] > 0) & (radii.max(axis=2) > 2.0)
        colors = [tuple(color) for color in rows[:, 2:5].astype(int).tolist()]
        keys = self._keys(np.delete(rows, (6,), axis=1), ends.mean(axis=1))
        views = []
        for view in range(len(self.views)):
            shown = np.flatnonzero(seen[view])
            flat = outlines[view, shown].reshape(len(shown), 4 * len(ARC)).tolist()
            light = lit[view, shown].reshape(len(shown), 4 * len(ARC)).tolist()
            items = zip(shown.tolist(), flat, light, is_lit[view, shown].tolist())
            views.append(
                [(keys[view][i], outline, colors[i], part if lit else None) for i, outline, part, lit in items]
            )
        return views

    def _polygons(self, shapes: _Shapes) -> list[list[tuple]]:
        """Key, outline, color and None of the polygons that each view shows."""
        points, rows = np.array(shapes.points), np.array(shapes.polygons)
        counts = rows[:, 0].astype(int)
        starts = np.cumsum(counts) - counts
        pixels, depths = self._project(points)
        low, high = np.minimum.reduceat(pixels, starts, axis=1), np.maximum.reduceat(pixels, starts, axis=1)
        near = np.minimum.reduceat(depths, starts, axis=1)
        seen = (near > NEAR) & (high > 0).all(axis=2) & (low < self.canvas).all(axis=2)
        centers = np.add.reduceat(points, starts, axis=0) / counts[:, None]
        colors = [tuple(color) for color in rows[:, 1:4].astype(int).tolist()]
        keys = self._keys(np.insert(rows, 0, 0, axis=1), centers)
        bounds = [*starts.tolist(), len(points)]
        views = []
        for view in range(len(self.views)):
            flat = pixels[view].ravel().tolist()
            shown = np.flatnonzero(seen[view]).tolist()
            views.append([(keys[view][i], flat[2 * bounds[i] : 2 * bounds[i + 1]], colors[i], None) for i in shown])
        return views

    @staticmethod
    def _directions(pixels: np.ndarray, radii: np.ndarray) -> np.ndarray:
        """Where the outlines of capsules are, as seen from their ends, in radii, `(views, capsules, points, 2)`.

        The first half of the points belongs to the circle around one end, the second to the other; the outline is the
        hull of both.
        """
        along = pixels[:, :, 1] - pixels[:, :, 0]
        length = np.linalg.norm(along, axis=-1)
        angle = np.arctan2(along[..., 1], along[..., 0])[..., None]
        difference = (radii[..., 0] - radii[..., 1]) / np.maximum(length, 1e-6)
        # Where the tangents touch; a circle inside the other leaves the whole outline to the larger one.
        touch = np.arccos(np.clip(difference, -1.0, 1.0))[..., None]
        angles = np.concatenate(
            [angle + touch + (2 * np.pi - 2 * touch) * ARC, angle - touch + 2 * touch * ARC], axis=2
        )
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1)

    def _develop(self, image: Image.Image, frame: int, view: int) -> np.ndarray:
        """Reduce the canvas to the picture, with the light of the take and grain."""
        picture = np.asarray(image.reduce(SUPERSAMPLING), np.float32) * self._light
        grain = self._grains[(frame * 5 + view * 3) % NUM_GRAINS]
        return np.clip(picture + grain, 0, 255).round().astype(np.uint8)
