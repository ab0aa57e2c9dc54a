"""What is wrong with a run as far as its settings tell, before a simulator is built for it."""

from __future__ import annotations

import torch

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.device import usable_device
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.sim.contract import SimSpec, TensorSpec
from robopolicy.sim.wrappers.registry import wrapped_spec
from robopolicy.text.imitation import TextLearner
from robopolicy.training.build import build, episodes_of
from robopolicy.training.config import TaskConfig, TrainConfig
from robopolicy.training.learner import learner

SIZE = 32  # of stand-in vectors


def rehearse(config: TrainConfig) -> None:
    """Build policy and algorithm of a completed configuration, for a stand-in of its task where nothing else tells.

    The stand-in may lack what the task shows. So where it is refused the run itself is built, and has the last word.
    Runs that train language models are not rehearsed.

    Raises:
        UserError: The run cannot be built.
    """
    device = usable_device(config.device)
    if issubclass(ALGORITHMS[str(config.algorithm["name"])], TextLearner):
        return
    episodes = episodes_of(config.dataset) if config.dataset else None
    sim = None if config.init_from or episodes is not None else stand_in(config.task)
    try:
        with torch.random.fork_rng(devices=[]):
            learner(config, episodes, sim, device)
    except Exception:  # whatever parts raise that see what they do not expect
        build(config).close()


def stand_in(task: TaskConfig) -> SimSpec:
    """What a simulator of a task might show: a vector, and what the settings ask for."""
    size = task.image_size
    shown: dict[str, tuple[int, ...]] = dict.fromkeys(("state", *task.observe), (SIZE,))
    shown |= {f"{IMAGE_PREFIX}{name}": (3, size, size) for name in task.cameras}
    shown |= {f"{CLOUD_PREFIX}{name}": (task.points, 3) for name in task.point_clouds}
    observation = {key: TensorSpec(shape) for key, shape in shown.items()}
    spec = SimSpec(task.name, observation, -torch.ones(2), torch.ones(2), control_dt=0.1, max_episode_steps=100)
    return wrapped_spec(spec, task.wrappers)
