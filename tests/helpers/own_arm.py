"""Demonstrations of an arm that no task describes: joint targets that pull the joints towards a pose."""

from pathlib import Path

import numpy as np

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import write_lerobot

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
GOAL = np.array([0.3, -0.2, 0.25, 0.1, -0.4, 0.2])


def demonstrations(episodes: int = 8, *, camera: bool = False, unit: str = "rad", reward: bool = False) -> Episodes:
    """Return episodes at 30 Hz with the joint positions as `state`, with a camera or rewards on request."""
    rng = np.random.default_rng(0)

    def one() -> Episode:
        position = rng.uniform(-0.5, 0.5, 6)
        states, actions = [], []
        for _ in range(20):
            states.append(position)
            actions.append(position + 0.2 * (GOAL - position))
            position = actions[-1]
        arrays = {"state": np.array(states, np.float32), "action": np.array(actions, np.float32)}
        arrays |= {"image.front": rng.integers(0, 255, (20, 3, 16, 16), np.uint8)} if camera else {}
        if reward:
            arrays["reward"] = -np.abs(arrays["state"] - GOAL.astype(np.float32)).sum(1)
        return Episode(arrays, "pick the block")

    names = tuple(f"{joint} [{unit}]" for joint in JOINTS)
    return Episodes.from_list([one() for _ in range(episodes)], 1 / 30, {"state": names, "action": names})


def record(path: Path, *, video: bool = False, **options: object) -> Path:
    """Write `demonstrations` to `path`."""
    write_lerobot(demonstrations(**options), path, video=video)  # type: ignore[arg-type]
    return path
