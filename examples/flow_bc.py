"""A flow-matching policy from demonstrations, on one page.

A scripted expert demonstrates the task a few times. A network then learns the velocity that carries noise to the
expert's action chunks (conditional flow matching), and Euler steps along it generate chunks for the robot. Read this
file from top to bottom first, then `examples/reinflow.py`, which improves the result by reinforcement learning.

    python -m examples.flow_bc                       # manipulation/lift, under a minute on a laptop
    python -m examples.flow_bc --quick               # the same path in seconds, to see that it runs
    python -m examples.flow_bc --task toy/point_mass --demos 20

The library does the same with every head, backbone, camera and checkpoint: `robopolicy train --help`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from robopolicy.evaluation.intervals import Interval, wilson
from robopolicy.nets.mlp import MLP
from robopolicy.nets.normalizer import Normalizer
from robopolicy.nets.time import SinusoidalEmbedding
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import Expert, SimOptions, get_task, make_sim


@dataclass(frozen=True)
class Config:
    """Everything you may want to change; each field is a command-line option."""

    task: str = "manipulation/lift"  # `robopolicy list` shows all
    demos: int = 10  # successful demonstrations; few, so that `reinflow.py` has something to improve
    horizon: int = 8  # H, actions per chunk
    action_horizon: int = 8  # Ta, actions executed before the next observation
    flow_steps: int = 4  # K, Euler steps from noise to chunk
    hidden: int = 256  # width of the three hidden layers
    updates: int = 3000  # gradient steps
    batch_size: int = 256  # chunks per gradient step
    lr: float = 1e-3  # peak learning rate (cosine decay to 0)
    num_envs: int = 32  # environments in parallel
    eval_episodes: int = 100  # held-out episodes, always the same seeds
    seed: int = 0  # of demonstrations, initial weights and minibatches
    out: str = "runs/flow_bc"  # where flow.safetensors goes
    quick: bool = False  # tiny sizes, to see in seconds that it runs


QUICK = {"demos": 4, "hidden": 32, "updates": 20, "batch_size": 32, "num_envs": 4, "eval_episodes": 4}
EVAL_SEED = 10_000  # first held-out episode


def first_episode(seed: int) -> int:
    """Seed of the first training episode of a run; never held out, and different for every run."""
    return 1_000_000 + 100_000 * seed


# ----------------------------------------------------------------------------------------------- demonstrations


def vector(obs: Observation) -> Tensor:
    """All vector observations concatenated, `(..., D)`; only the library handles cameras."""
    return torch.cat([obs[key].float() for key in sorted(obs) if not key.startswith("image.")], -1)


def demonstrate(sim: VectorSim, expert: Expert, demos: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Run the expert until `demos` episodes succeed; returns (observations `(L, D)`, actions `(L, A)`) each."""
    episodes: list[tuple[Tensor, Tensor]] = []
    running: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(sim.num_envs)]  # steps of the current episodes
    success = torch.zeros(sim.num_envs, dtype=torch.bool)
    obs = sim.reset(seed)
    while len(episodes) < demos:
        action = expert(sim, obs)  # (N, A)
        for steps, state, played in zip(running, vector(obs), action, strict=True):
            steps.append((state, played))
        step = sim.step(action)
        success |= step.info["success"]
        for i in step.done.nonzero().flatten().tolist():  # these episodes ended; `step.obs` is from the next one
            if success[i]:
                states, actions = zip(*running[i], strict=True)
                episodes.append((torch.stack(states), torch.stack(actions)))
            running[i], success[i] = [], False
        obs = step.obs
    return episodes[:demos]


def slice_chunks(episodes: list[tuple[Tensor, Tensor]], horizon: int) -> tuple[Tensor, Tensor]:
    """Pair every observation with the actions that follow it: `(F, D)` and `(F, H, A)`.

    After the end of an episode the last action repeats.
    """
    states, chunks = [], []
    for state, action in episodes:
        index = torch.arange(len(state))[:, None] + torch.arange(horizon)  # (L, H)
        states.append(state)
        chunks.append(action[index.clamp(max=len(state) - 1)])  # (L, H, A)
    return torch.cat(states), torch.cat(chunks)


# ------------------------------------------------------------------------------------------------------ policy


class Flow(nn.Module):
    """Velocity field over action chunks. Time runs from 0 (noise) to 1 (data); velocity = data - noise."""

    def __init__(self, state_dim: int, action_dim: int, config: Config) -> None:
        super().__init__()
        self.shape = (config.horizon, action_dim)
        self.steps = config.flow_steps
        self.state_norm = Normalizer(state_dim, "minmax")  # to [-1, 1]; stored with the weights
        self.action_norm = Normalizer(action_dim, "minmax")
        self.time = SinusoidalEmbedding(32)
        size = config.horizon * action_dim
        self.net = MLP(state_dim + size + 32, [config.hidden] * 3, size, activation="mish")

    def velocity(self, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Velocity `(B, H, A)` at `x` `(B, H, A)` and time `t` `(B,)`, all in normalised units but `state` `(B, D)`."""
        inputs = torch.cat([self.state_norm.normalize(state), x.flatten(1), self.time(t)], -1)
        return self.net(inputs).unflatten(1, self.shape)

    def loss(self, state: Tensor, chunk: Tensor) -> Tensor:
        """Conditional flow matching: at a random point of a straight line, predict its direction."""
        data = self.action_norm.normalize(chunk)  # (B, H, A)
        noise = torch.randn_like(data)
        t = torch.rand(len(data))  # (B,)
        x = noise + t[:, None, None] * (data - noise)  # the point at time t
        return nn.functional.mse_loss(self.velocity(state, x, t), data - noise)

    def decode(self, state: Tensor, noise: Tensor) -> Tensor:
        """Follow the velocity from `noise` `(B, H, A)` to a chunk `(B, H, A)` in the robot's units."""
        x = noise
        for k in range(self.steps):
            t = torch.full((len(x),), k / self.steps)
            x = x + self.velocity(state, x, t) / self.steps
        return self.action_norm.denormalize(x)


def train(flow: Flow, states: Tensor, chunks: Tensor, config: Config) -> None:
    """Minimise the flow-matching loss; leaves the averaged weights in `flow`."""
    for norm, values in ((flow.state_norm, states), (flow.action_norm, chunks.flatten(0, 1))):
        norm.fit({"min": values.amin(0), "max": values.amax(0)})
    optimizer = torch.optim.AdamW(flow.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.updates)
    average = [parameter.detach().clone() for parameter in flow.parameters()]
    start = time.perf_counter()
    for update in range(config.updates):
        rows = torch.randint(len(states), (config.batch_size,))
        loss = flow.loss(states[rows], chunks[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        decay = min(0.999, 1 - (1 + update) ** -0.75)  # averaged weights perform better than the last ones
        for mean, parameter in zip(average, flow.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 - decay)
        if update % max(1, config.updates // 10) == 0:
            print(f"update {update:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:5.1f} s")
    with torch.no_grad():
        for mean, parameter in zip(average, flow.parameters(), strict=True):
            parameter.copy_(mean)


# -------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(flow: Flow, sim: VectorSim, action_horizon: int, episodes: int) -> Interval:
    """Success on held-out seeds with its 95 % Wilson interval. Each environment runs one episode per round."""
    chunked = ChunkedSim(sim, action_horizon=action_horizon)
    success: list[bool] = []
    while len(success) < episodes:
        obs = chunked.reset(EVAL_SEED + len(success))
        seeds = sim.episode_seed.tolist()
        running = torch.ones(sim.num_envs, dtype=torch.bool)
        succeeded = torch.zeros(sim.num_envs, dtype=torch.bool)
        decision = 0
        while running.any():
            # Noise depends only on the episode and the decision, so the result is the same for any `num_envs`.
            noise = PerRowGenerator(seeds, [decision] * sim.num_envs).normal((sim.num_envs, *flow.shape))
            step = chunked.step(flow.decode(vector(obs)[:, -1], noise))
            succeeded |= running & step.info["success"]  # an episode counts once; later steps do not count
            running &= ~step.done
            obs, decision = step.obs, decision + 1
        success += succeeded.tolist()
    return wilson(sum(success[:episodes]), episodes)


# ------------------------------------------------------------------------------------------------ the program

Settings = TypeVar("Settings")


def parse(defaults: Settings, quick: dict[str, int], description: str | None, argv: Sequence[str] | None) -> Settings:
    """Turn every field of `defaults` into a command-line option; `--quick` replaces those in `quick`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(defaults):  # type: ignore[arg-type]
        value = getattr(defaults, field.name)
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(name, action="store_true", default=None)
        else:
            parser.add_argument(name, type=type(value), help=f"default {value}")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    return replace(defaults, **((quick | given) if "quick" in given else given))  # type: ignore[type-var]


def save(flow: Flow, config: Config, path: Path) -> None:
    """Write weights, normalisers and settings into one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(flow.state_dict(), path, metadata={"config": json.dumps(asdict(config))})


def load(path: Path) -> tuple[Flow, Config]:
    """Read a file of `save`."""
    with safe_open(path, "pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, the file is not a dict
    flow = Flow(len(weights["state_norm.offset"]), len(weights["action_norm.offset"]), config)
    flow.load_state_dict(weights)
    return flow, config


def main(argv: Sequence[str] | None = None) -> Interval:
    """Collect, train, evaluate, save; returns the success rate."""
    config = parse(Config(), QUICK, __doc__, argv)
    torch.set_num_threads(1)  # fastest for networks this small
    torch.manual_seed(config.seed)
    sim = make_sim(config.task, SimOptions(num_envs=config.num_envs))
    make_expert = get_task(config.task).make_expert
    if make_expert is None:
        raise SystemExit(f"{config.task} has no scripted expert.")

    episodes = demonstrate(sim, make_expert(), config.demos, first_episode(config.seed))
    states, chunks = slice_chunks(episodes, config.horizon)
    print(f"{len(episodes)} demonstrations, {len(states)} steps, state {states.shape[1]}, action {chunks.shape[2]}")

    flow = Flow(states.shape[1], chunks.shape[2], config)
    train(flow, states, chunks, config)
    success = evaluate(flow, sim, config.action_horizon, config.eval_episodes)
    print(f"success {success:.1%} on {success.n} held-out episodes")

    path = Path(config.out) / "flow.safetensors"
    save(flow, config, path)
    print(f"wrote {path}")
    return success


if __name__ == "__main__":
    main()
