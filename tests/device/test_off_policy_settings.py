"""Launches and waits of the settings of FlashSAC and FastTD3 on the simulated device, against plain SAC and TD3."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import batch, gaussian

from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.critics.q import CriticConfig
from robopolicy.data.return_scale import ReturnScale
from robopolicy.device import move
from robopolicy.policies.noise import RepeatedNoise

simulated = pytest.importorskip("simulated", exc_type=ImportError)
C51 = {"bins": 11, "histogram": "c51", "value_min": -2.0, "value_max": 2.0}
ADDED = 31  # launches that C51 and the choice of members may add to a gradient step
FLASH = 318  # mean launches of a gradient step of FlashSAC with an actor step in every second one; its code without
# compilation launches 643 on the same sizes


def measure(cls: Any, critic: dict[str, Any], actor: dict[str, Any], **settings: Any) -> list[Any]:
    """Counts of the third and the fourth gradient step, which also steps the actor."""
    torch.manual_seed(0)
    policy = gaussian(activation="relu", state_dependent_std=True, **actor).to(simulated.DEVICE)
    config = {"hidden": (32, 32), "activation": "relu", "layer_norm": False} | critic
    config_class = SACConfig if cls is SAC else TD3Config
    with torch.device(simulated.DEVICE):
        settings = {"critic": CriticConfig(**config), "batch_size": 64, "policy_delay": 2} | settings
        algorithm = cls(config_class(**settings), policy, total_updates=10)
    rows = move(batch(torch.rand(64, 2, 1) * 2 - 1, lambda x: x.squeeze(1), discount=0.9), simulated.DEVICE)
    found: list[Any] = []
    for _ in range(4):
        with simulated.record() as counted:
            algorithm.update(rows)
        found.append(counted)
    return found[2:]


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (SAC, {"average_members": True}),
        (SAC, {"weight_decay": 0.1, "lr_final_fraction": 0.5, "target_std": 0.15}),
        (TD3, {"value_reduction": "min", "policy_tau": 1.0, "weight_decay": 0.1}),
        (TD3, {"value_reduction": "mean"}),
    ],
)
def test_distributional_critics_add_few_launches_and_no_wait(cls: Any, settings: dict[str, Any]) -> None:
    for plain, found in zip(measure(cls, {}, {}), measure(cls, C51, {}, **settings), strict=True):
        assert found.launches <= plain.launches + ADDED, found.places()
        assert found.waits <= plain.waits, found.places()


def test_flash_sac_keeps_its_budget_of_launches_and_adds_no_wait() -> None:
    network = {"backbone": "inverted_residual"}
    found = measure(SAC, C51 | network, network | {"log_std_tanh": True}, lr_final_fraction=0.5)
    assert sum(each.launches for each in found) / 2 <= FLASH, found[1].places()
    for plain, each in zip(measure(SAC, {}, {}), found, strict=True):
        assert each.waits <= plain.waits, each.places()


def test_repeated_noise_and_the_scale_of_returns_never_wait() -> None:
    device = torch.device(simulated.DEVICE)
    noise = RepeatedNoise(16, torch.Generator(device).manual_seed(0))
    scale, rows = ReturnScale(5.0, 0.99, 8, device), torch.ones(8, dtype=torch.bool, device=device)
    noise.normal((8, 1, 2))
    with simulated.record() as found:
        for _ in range(3):
            noise.normal((8, 1, 2))
            scale.observe(torch.ones(8, device=device), ~rows, rows)
            scale.factor()
    assert found.waits == 0 and found.launches <= 3 * 60, found.places()


@pytest.mark.parametrize("delay", [1, 2])
def test_one_pass_for_both_draws_of_sac_changes_no_weight(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "robopolicy.policies.heads.gaussian.normal", lambda shape, _, device: torch.ones(shape, device=device)
    )
    rows = move(batch(torch.rand(64, 2, 1) * 2 - 1, lambda x: x.squeeze(1), discount=0.9), simulated.DEVICE)
    rows = replace(rows, next_obs={key: value + 0.5 for key, value in rows.obs.items()})
    trained: list[list[torch.Tensor]] = []
    for shared in (True, False):
        torch.manual_seed(0)
        policy = gaussian(activation="relu", state_dependent_std=True).to(simulated.DEVICE)
        with torch.device(simulated.DEVICE):
            algorithm = SAC(SACConfig(batch_size=16, policy_delay=delay, lr=0.01), policy, total_updates=10)
        if not shared:
            monkeypatch.setattr(algorithm, "_draw_both", lambda _: None)
        algorithm.update(rows)
        trained.append([weight.detach().cpu() for part in (policy, algorithm.critic) for weight in part.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
