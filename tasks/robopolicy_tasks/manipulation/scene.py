"""Panda scenes with the built-in primitive model or a mesh model from MuJoCo Menagerie."""

from __future__ import annotations

import mujoco

from robopolicy_tasks.menagerie import ASSETS, resolve_model

ARM_JOINTS = tuple(f"joint{i}" for i in range(1, 8))
FINGER_JOINTS = ("finger_joint1", "finger_joint2")


def build_model(scene: str) -> mujoco.MjModel:
    """Compile `sim_assets/<scene>.xml` with the robot attached at its frame "robot".

    With the environment variable `MENAGERIE_ROOT` set, the robot is `franka_emika_panda/panda.xml` of that folder.
    """
    spec = mujoco.MjSpec.from_file(str(ASSETS / f"{scene}.xml"))
    robot = mujoco.MjSpec.from_file(str(resolve_model("panda.xml", "franka_emika_panda/panda.xml")))
    robot.option.integrator = spec.option.integrator
    _tune(robot)
    spec.attach(robot, prefix="", frame=spec.frame("robot"))
    spec.body("hand").add_camera(name="wrist", pos=[0.085, 0.0, 0.02], quat=[0.123, 0.696, 0.696, 0.123], fovy=75)
    return spec.compile()


def _tune(robot: mujoco.MjSpec) -> None:
    """Set the servo gains and rotor inertias of the built-in model, which controller and time step require."""
    builtin = mujoco.MjSpec.from_file(str(ASSETS / "panda.xml"))
    for joint in builtin.joints:
        other = robot.joint(joint.name)
        other.armature, other.damping = joint.armature, joint.damping
    for actuator in builtin.actuators:
        other = robot.actuator(actuator.name)
        other.gainprm, other.biasprm = actuator.gainprm, actuator.biasprm
        other.ctrlrange, other.forcerange = actuator.ctrlrange, actuator.forcerange
    for body in robot.bodies[1:]:
        body.gravcomp = 1.0
