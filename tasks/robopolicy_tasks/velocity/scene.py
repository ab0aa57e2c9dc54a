"""Scene of the Go1 on level ground, with foot sensors and actuators for pushes."""

from __future__ import annotations

import mujoco

from robopolicy_tasks.menagerie import ASSETS, resolve_model

FEET = ("FR", "FL", "RR", "RL")  # front right, front left, rear right, rear left, as joints and motors
JOINTS = tuple(f"{foot}_{part}_joint" for foot in FEET for part in ("hip", "thigh", "calf"))
TRUNK = "trunk"
PUSHES = ("push_x", "push_y")  # forces on the trunk along the world axes [N]


def build_model() -> mujoco.MjModel:
    """Compile `sim_assets/flat.xml` with the robot at its frame "robot".

    With the environment variable `MENAGERIE_ROOT` set, the robot is `unitree_go1/go1.xml` of that folder.
    """
    scene = mujoco.MjSpec.from_file(str(ASSETS / "flat.xml"))
    robot = mujoco.MjSpec.from_file(str(resolve_model("go1.xml", "unitree_go1/go1.xml")))
    robot.option = scene.option
    _tune(robot)
    scene.attach(robot, prefix="", frame=scene.frame("robot"))
    trunk = scene.body(TRUNK)
    trunk.joints[0].name = TRUNK
    for axis, name in enumerate(PUSHES):
        gear = [0.0] * 6
        gear[axis] = 1.0
        scene.add_actuator(name=name, trntype=mujoco.mjtTrn.mjTRN_JOINT, target=TRUNK, gear=gear)
    for foot in FEET:
        site = {"objtype": mujoco.mjtObj.mjOBJ_SITE, "objname": foot}
        scene.add_sensor(name=f"{foot}_touch", type=mujoco.mjtSensor.mjSENS_TOUCH, **site)
        scene.add_sensor(name=f"{foot}_position", type=mujoco.mjtSensor.mjSENS_FRAMEPOS, **site)
        scene.add_sensor(name=f"{foot}_velocity", type=mujoco.mjtSensor.mjSENS_FRAMELINVEL, **site)
    camera = {"mode": mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM, "fovy": 45}
    trunk.add_camera(name="side", pos=[0.0, -1.5, 0.55], xyaxes=[1, 0, 0, 0, 0.26, 0.97], **camera)
    trunk.add_camera(name="front", pos=[1.3, -0.9, 0.6], xyaxes=[0.57, 0.82, 0, -0.24, 0.17, 0.96], **camera)
    return scene.compile()


def _tune(robot: mujoco.MjSpec) -> None:
    """Set the servo gains, dampings and foot contacts of the built-in model, which time step and policy require."""
    builtin = mujoco.MjSpec.from_file(str(ASSETS / "go1.xml"))
    for name in JOINTS:
        joint, other = builtin.joint(name), robot.joint(name)
        other.armature, other.damping, other.frictionloss = joint.armature, joint.damping, joint.frictionloss
    for actuator in builtin.actuators:
        other = robot.actuator(actuator.name)
        other.gainprm, other.biasprm, other.forcerange = actuator.gainprm, actuator.biasprm, actuator.forcerange
    for foot in FEET:
        geom, other = builtin.geom(foot), robot.geom(foot)
        other.friction, other.condim, other.solimp = geom.friction, geom.condim, geom.solimp
