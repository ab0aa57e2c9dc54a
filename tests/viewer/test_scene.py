"""Tests of the bodies that a predicted path belongs to, found in small models by hand."""

import mujoco
import pytest

from robopolicy.viewer.scene import end_effector

ARM = """<body name="link"><joint name="a"/><geom size=".1"/><body name="hand"><geom size=".1"/>
<body name="left"><joint name="l" type="slide"/><geom size=".1"/></body>
<body name="right"><joint name="r" type="slide"/><geom size=".1"/></body></body></body>
<body name="cube"><freejoint/><geom size=".1"/></body>"""
DOG = """<body name="trunk"><freejoint/><geom size=".1"/>
<body name="front"><joint name="f"/><geom size=".1"/><body name="paw"><joint name="p"/><geom size=".1"/></body></body>
<body name="back"><joint name="b"/><geom size=".1"/></body></body>"""


@pytest.mark.parametrize(
    "bodies, motors, expected",
    [
        (ARM, "alr", "left right"),  # the hand moves with the arm, and its fingers are last
        (ARM, "a", "left right"),  # fingers without actuators of their own
        (ARM, "lr", "hand"),  # the arm is not actuated
        (ARM, "", "link"),  # the first body, without actuators
        (DOG, "fpb", "trunk"),
        (DOG, "fp", "paw"),
    ],
)
def test_the_end_effector_is_behind_all_that_is_actuated(bodies: str, motors: str, expected: str) -> None:
    actuators = "".join(f'<motor joint="{joint}"/>' for joint in motors)
    xml = f"<mujoco><worldbody>{bodies}</worldbody><actuator>{actuators}</actuator></mujoco>"
    model = mujoco.MjModel.from_xml_string(xml)
    assert " ".join(model.body(body).name for body in end_effector(model)) == expected
