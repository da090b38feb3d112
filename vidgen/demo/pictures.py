"""Frames on their way to a browser."""

from __future__ import annotations

import base64
import io

import numpy as np
import PIL.Image

QUALITY = 88


def to_data_uri(frame: np.ndarray, width: int | None = None) -> str:
    """A frame as the text of a JPEG that a page shows without another request.

    Args:
        frame: uint8 `(height, width, 3)`.
        width: to scale down to, pixels; None keeps the size.
    """
    picture = PIL.Image.fromarray(frame)
    if width is not None and width < picture.width:
        picture = picture.resize((width, max(1, round(picture.height * width / picture.width))))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")
