"""Budgets of launches and waits of an update on the simulated device: a slow line fails here.

The section `update` of `budgets.toml` holds them for one update of tiny networks, the section `minibatch` for one
minibatch of PPO and one gradient step of SAC and TD3.

    PYTHONPATH=tests/helpers python tests/device/test_budgets.py     # measure and write both sections
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import budgets, check_budget, write_budgets

from docs.compatibility import PRODUCT_HEADS, allowed, opened, workplace
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout, Transitions
from robopolicy.data.replay import Replay
from robopolicy.device import move
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.registry import POLICIES, make_policy

simulated = pytest.importorskip("simulated", exc_type=ImportError)
DEVICE = simulated.DEVICE
STEPS, ENVS, OBS, ACTIONS = 8, 32, 17, 6
SPEC = PolicySpec({"state": (OBS,)}, ACTIONS)
RATES = {"target_kl": 0.01, "lr_schedule": "adaptive", "entropy_coef": 0.01, "value_clip": 0.2}  # mjlab's settings


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace(ALGORITHMS.product()) as folder:
        yield folder


def count_update(name: str, place: Path) -> Any:
    """Count the second update of an algorithm with its first small head; the first one initialises."""
    with opened(place, name, min({*allowed(name)} - {"act"}), device=simulated.NAME) as parts:
        algorithm, source = parts.algorithm, parts.source
        algorithm.update(source.next(algorithm))
        batch = source.next(algorithm)
        with simulated.record() as found:
            algorithm.update(batch)
    return found


def policy(kind: str, **settings: Any) -> Policy:
    name, values = PRODUCT_HEADS[kind]
    config = POLICIES[name].config_class(**{**values, **settings})
    made = make_policy(name, config, SPEC)
    low, high = torch.full((ACTIONS,), -1.0), torch.full((ACTIONS,), 2.0)
    state = {"min": -torch.ones(OBS), "max": torch.ones(OBS), "mean": torch.zeros(OBS), "std": torch.ones(OBS)}
    made.fit_normalizer({"state": {**state, "count": [10]}, "action": {"min": low, "max": high}})
    return made.to(DEVICE)


def rollout(algorithm: PPO) -> Rollout:
    obs = {"state": torch.randn(STEPS, ENVS, 1, OBS, device=DEVICE)}
    with torch.no_grad():
        sample = algorithm.act({"state": obs["state"].flatten(0, 1)}, generator=torch.Generator(DEVICE))
    record = {key: value.unflatten(0, (STEPS, ENVS)) for key, value in sample.record.items()}
    ends = torch.zeros(STEPS, ENVS, dtype=torch.bool, device=DEVICE)
    ones = torch.ones(STEPS, ENVS, dtype=torch.int64, device=DEVICE)
    last = {"state": torch.randn(ENVS, 1, OBS, device=DEVICE)}
    final = {"state": torch.zeros(0, 1, OBS, device=DEVICE)}
    logp, reward = sample.logp.unflatten(0, (STEPS, ENVS)), torch.randn(STEPS, ENVS, device=DEVICE)
    return Rollout(obs, record, logp, reward, ones, ends, ends, final, last)


def count_ppo(epochs: int, **settings: Any) -> tuple[Any, int]:
    """Count an update of PPO, and its minibatches."""
    network: dict[str, Any] = {"hidden": (64, 64, 64), "activation": "elu", "normalization": "running"}
    config = PPOConfig(epochs=epochs, batch_size=64, critic=ValueConfig(**network), **settings)
    actor = make_policy("gaussian", GaussianConfig(**network), SPEC).to(DEVICE)
    with torch.device(DEVICE):
        algorithm = PPO(config, actor, total_updates=10)
    algorithm.update(rollout(algorithm))
    batch = rollout(algorithm)
    with simulated.record() as found:
        algorithm.update(batch)
    return found, epochs * STEPS * ENVS // 64


def windows(algorithm: SAC | TD3, batches: int) -> Transitions:
    replay = Replay(4096, ENVS)
    generator, no = torch.Generator().manual_seed(0), torch.zeros(ENVS, dtype=torch.bool)
    for _ in range(20):
        obs = {"state": torch.randn(ENVS, OBS, generator=generator)}
        replay.add(torch.arange(ENVS), obs, torch.rand(ENVS, ACTIONS), torch.rand(ENVS), no, no, obs)
    return move(replay.sample(algorithm.sample_spec, generator, batches=batches), DEVICE)


def count_off_policy(cls: Any, config: Any, batches: int, normalization: str) -> tuple[Any, int]:
    """Count an update of SAC or TD3, and its gradient steps."""
    with torch.device(DEVICE):
        actor = policy("squashed_gaussian", normalization=normalization)
        algorithm = cls(config, actor, total_updates=10)
    algorithm.update(windows(algorithm, batches))
    batch = windows(algorithm, batches)
    with simulated.record() as found:
        algorithm.update(batch)
    return found, batches


COUNTS: dict[str, Callable[[int], tuple[Any, int]]] = {
    "ppo": lambda size: count_ppo(size),
    "ppo_of_mjlab": lambda size: count_ppo(size, **RATES),
    "sac": lambda size: count_off_policy(SAC, SACConfig(batch_size=64), 2 * size, "minmax"),
    "sac_without_normalization": lambda size: count_off_policy(SAC, SACConfig(batch_size=64), 2 * size, "identity"),
    "td3": lambda size: count_off_policy(TD3, TD3Config(batch_size=64), 2 * size, "minmax"),
}


def count_minibatch(name: str) -> tuple[float, float, Any]:
    """Launches and waits of a further minibatch, and the record of the larger update."""
    (small, few), (large, many) = COUNTS[name](1), COUNTS[name](3)
    size = many - few
    return (large.launches - small.launches) / size, (large.waits - small.waits) / size, large


@pytest.mark.parametrize("name", sorted(budgets("update")))
def test_an_update_keeps_its_budget(name: str, place: Path) -> None:
    found = count_update(name, place)
    check_budget("update", name, found.launches, found.waits, found)


@pytest.mark.parametrize("name", COUNTS)
def test_a_minibatch_keeps_its_budget_and_does_not_wait(name: str) -> None:
    launches, waits, found = count_minibatch(name)
    assert waits == 0, found.places()
    check_budget("minibatch", name, launches, waits, found)


def test_every_algorithm_has_a_budget() -> None:
    assert set(budgets("update")) == {name for name in ALGORITHMS.product() if allowed(name)}


def main() -> None:
    """Write the budgets."""
    with workplace(ALGORITHMS.product()) as folder:
        counted = {name: count_update(name, folder) for name in ALGORITHMS.product() if allowed(name)}
    write_budgets(
        "update", {name: {"launches": found.launches, "waits": found.waits} for name, found in counted.items()}
    )
    further = {name: count_minibatch(name) for name in COUNTS}
    write_budgets("minibatch", {name: {"launches": row[0], "waits": row[1]} for name, row in further.items()})
    sys.stdout.write("Wrote the sections update and minibatch of budgets.toml.\n")


if __name__ == "__main__":
    main()
