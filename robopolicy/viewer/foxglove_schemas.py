"""JSON schemas of the messages of Foxglove that `McapSink` writes: the fields that it uses.

Names and fields follow Foxglove's public schemas; `title` is the name of the schema.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _record(title: str = "", /, **fields: Schema) -> Schema:
    return {"title": title, "type": "object", "properties": fields}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_NUMBER, _INTEGER, _TEXT, _FLAG = ({"type": kind} for kind in ("number", "integer", "string", "boolean"))
_BYTES = {"type": "string", "contentEncoding": "base64"}
_TIME = _record(sec=_INTEGER, nsec=_INTEGER)
_VECTOR = _record(x=_NUMBER, y=_NUMBER, z=_NUMBER)
_QUATERNION = _record(x=_NUMBER, y=_NUMBER, z=_NUMBER, w=_NUMBER)
_POSE = _record(position=_VECTOR, orientation=_QUATERNION)
_COLOUR = _record(r=_NUMBER, g=_NUMBER, b=_NUMBER, a=_NUMBER)
_LINE = _record(type=_INTEGER, thickness=_NUMBER, scale_invariant=_FLAG, color=_COLOUR, points=_list(_VECTOR))
_MODEL = _record(pose=_POSE, scale=_VECTOR, color=_COLOUR, override_color=_FLAG, media_type=_TEXT, data=_BYTES)
_ENTITY = _record(
    timestamp=_TIME,
    frame_id=_TEXT,
    id=_TEXT,
    lifetime=_TIME,
    frame_locked=_FLAG,
    lines=_list(_LINE),
    models=_list(_MODEL),
)
_TRANSFORM = _record(
    timestamp=_TIME, parent_frame_id=_TEXT, child_frame_id=_TEXT, translation=_VECTOR, rotation=_QUATERNION
)

SCENE = _record("foxglove.SceneUpdate", entities=_list(_ENTITY))
TRANSFORMS = _record("foxglove.FrameTransforms", transforms=_list(_TRANSFORM))
IMAGE = _record("foxglove.CompressedImage", timestamp=_TIME, frame_id=_TEXT, format=_TEXT, data=_BYTES)
LOG = _record("foxglove.Log", timestamp=_TIME, level=_INTEGER, message=_TEXT, name=_TEXT)
NUMBERS = _record("robopolicy.Numbers")

INFO, WARNING = 2, 3  # levels of `LOG`
