"""A scripted policy that lifts the cube from the observation alone: hover, descend, close, lift."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.policies.base import Policy
from robopolicy.spec import PolicySpec
from robopolicy_tasks.manipulation.experts import quarter_turn
from robopolicy_tasks.manipulation.lift import CUBE_HALF, Lift
from robopolicy_tasks.manipulation.panda_task import POSITION_STEP, YAW_STEP

NAMES = Lift().observation["state"].names
TOOL, LEAD, CUBE = (NAMES.index(f"{what}_x [m]") for what in ("tool", "commanded_minus_tool", "cube"))
TURN, CUBE_TURN, WIDTH = (
    NAMES.index("tool_rotation_xx"),
    NAMES.index("cube_rotation_xx"),
    NAMES.index("gripper_width [m]"),
)
HOVER = 0.06  # [m] above the cube before descending


def lift_chunk(state: NDArray[np.floating], horizon: int) -> NDArray[np.float32]:
    """Return actions `(horizon, 5)`, assuming that the arm follows the commanded tool exactly."""
    state = state.astype(np.float64)
    tool, cube = state[TOOL : TOOL + 3], state[CUBE : CUBE + 3]
    wanted = tool + state[LEAD : LEAD + 3]
    turn = quarter_turn(np.arctan2(state[CUBE_TURN + 1], state[CUBE_TURN]) - np.arctan2(state[TURN + 1], state[TURN]))
    offset = np.abs(cube - tool)
    grasp = offset[:2].max() < 0.015 and offset[2] < 0.012
    held = np.linalg.norm(cube - tool) < 0.025 and state[WIDTH] < 2 * CUBE_HALF + 0.01
    off = np.hypot(*(cube - tool)[:2]) + 0.05 * abs(turn)
    goal = cube + np.array([0.0, 0.0, HOVER * np.clip((off - 0.012) / 0.03, 0.0, 1.0)])
    if held:
        goal = np.array([*cube[:2], tool[2] + 0.1])
    actions = np.zeros((horizon, 5))
    for action in actions:
        action[:3] = 0.8 * np.clip((goal - wanted) / POSITION_STEP, -1.0, 1.0)
        action[3] = np.clip(turn / YAW_STEP, -1.0, 1.0)
        action[4] = 1.0 if grasp else -1.0
        wanted, turn = wanted + POSITION_STEP * action[:3], turn - YAW_STEP * action[3]
    return actions.astype(np.float32)


class ScriptedLift(Policy):
    """`lift_chunk` as a policy, for evaluations."""

    network_calls = 0

    def __init__(self, horizon: int = 8, action_horizon: int = 4) -> None:
        super().__init__()
        self.spec = PolicySpec({"state": (len(NAMES),)}, 5, horizon, action_horizon)

    def act(self, obs: Mapping[str, Tensor], **_: Any) -> Tensor:
        rows = obs["state"][:, -1].numpy()
        return torch.from_numpy(np.stack([lift_chunk(row, self.spec.horizon) for row in rows]))
