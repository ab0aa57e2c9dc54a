"""Tests of rsl_rl import and export: actors of all file layouts, configs, and our simulators in its runner."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.interop.rsl_rl import actor_state, read_actor, read_config, runner_config, write_actor
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.registry import SimOptions, make_sim

SHAPES = {"state": (4,), "goal": (2,)}
GROUPS = ("state", "goal")  # rsl_rl's order; ours is sorted
OBS = {key: torch.randn(7, 1, *shape, generator=torch.Generator().manual_seed(0)) for key, shape in SHAPES.items()}
NETWORK = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 5), nn.ELU(), nn.Linear(5, 3))
NORM = {"_mean": torch.randn(1, 6), "_std": torch.rand(1, 6) + 0.5, "_var": torch.ones(1, 6), "count": torch.tensor(9)}
STD = torch.tensor([0.1, 1.0, 2.0])
PLAIN: dict[str, Any] = {"hidden_dims": [8, 5], "activation": "elu", "obs_normalization": True}
OLD = {"actor_hidden_dims": [8, 5], "critic_hidden_dims": [8], "activation": "elu", "class_name": "ActorCritic"}
LOG = {"class_name": "rsl_rl.modules:GaussianDistribution", "std_type": "log"}


def named(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{key}": value for key, value in state.items()}


def layouts() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """File contents and configuration of the same actor in every version of rsl_rl."""
    mlp = NETWORK.state_dict()
    old = {**named("actor.", mlp), **named("critic.", {"0.weight": torch.zeros(1, 6)}), "std": STD}
    later = {**named("mlp.", mlp), **named("obs_normalizer.", NORM)}
    return {
        "2": ({"model_state_dict": old, "obs_norm_state_dict": NORM}, {"policy": OLD, "empirical_normalization": True}),
        "3": (
            {"model_state_dict": {**old, **named("actor_obs_normalizer.", NORM)}},
            {"policy": {**OLD, "actor_obs_normalization": True}, "obs_groups": {"policy": list(GROUPS)}},
        ),
        "4": ({"actor_state_dict": {**later, "std": STD}}, {"actor": {**PLAIN, "stochastic": True}}),
        "5": (
            {"actor_state_dict": {**later, "distribution.log_std_param": STD.log()}, "infos": None, "iter": 3},
            {"actor": {**PLAIN, "class_name": "MLPModel", "distribution_cfg": LOG}},
        ),
    }


def expected() -> Tensor:
    joined = torch.cat([OBS[key][:, 0] for key in GROUPS], 1)
    return NETWORK((joined - NORM["_mean"]) / (NORM["_std"] + 0.01))


@pytest.mark.parametrize("version", ["2", "3", "4", "5"])
def test_actors_of_every_version_load_with_their_statistics(version: str, tmp_path: Path) -> None:
    content, config = layouts()[version]
    torch.save({**content, "optimizer_state_dict": {"state": {}}}, tmp_path / "model.pt")
    config.setdefault("obs_groups", {"actor": list(GROUPS)})
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(config))
    policy = read_actor(tmp_path / "model.pt", read_config(tmp_path / "agent.yaml"), SHAPES)
    assert policy.spec == PolicySpec(SHAPES, 3)
    torch.testing.assert_close(policy.act(OBS, deterministic=True)[:, 0], expected())
    torch.testing.assert_close(policy.log_std[0].exp(), STD)


def test_observation_groups_can_be_renamed(tmp_path: Path) -> None:
    torch.save(layouts()["5"][0], tmp_path / "model.pt")
    config = {**layouts()["5"][1], "obs_groups": {"actor": ["policy", "command"]}}
    policy = read_actor(
        tmp_path / "model.pt", read_config(config), SHAPES, rename={"state": "policy", "goal": "command"}
    )
    torch.testing.assert_close(policy.act(OBS, deterministic=True)[:, 0], expected())
    with pytest.raises(UserError, match=r"Unknown observation 'command' for the group 'command'"):
        read_actor(tmp_path / "model.pt", read_config(config), SHAPES, rename={"state": "policy"})


@pytest.mark.parametrize("normalization", ["identity", "meanstd", "running"])
@pytest.mark.parametrize("predicted", [False, True])
def test_exported_policy_loads_back_unchanged(normalization: str, predicted: bool, tmp_path: Path) -> None:
    config = GaussianConfig(
        hidden=(8, 5), activation="silu", normalization=normalization, state_dependent_std=predicted
    )
    policy = GaussianPolicy(config, PolicySpec(SHAPES, 3))
    statistics = {key: {"mean": [0.5] * n, "std": [2.0] * n, "count": [4]} for key, (n,) in SHAPES.items()}
    policy.fit_normalizer(statistics)
    write_actor(policy, tmp_path / "model.pt")
    settings = runner_config(config, policy.spec)
    assert settings["actor"]["activation"] == "swish" and settings["obs_groups"]["actor"] == ["goal", "state"]
    back = read_actor(tmp_path / "model.pt", read_config(settings), SHAPES)
    assert back.config.hidden == config.hidden and back.config.state_dependent_std == predicted
    for before, after in zip(policy.distribution(OBS), back.distribution(OBS), strict=True):
        torch.testing.assert_close(before, after)


def test_mismatched_files_and_configs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    content, settings = layouts()["5"]
    settings = {**settings, "obs_groups": {"actor": list(GROUPS)}}
    actor = settings["actor"]

    def read(content: Any = content, shapes: Any = SHAPES, **changes: Any) -> None:
        torch.save(content, file)
        read_actor(file, read_config({**settings, "actor": {**actor, **changes}}), shapes)

    weights = content["actor_state_dict"]
    spec = PolicySpec(SHAPES, 3)
    refusals = {
        "Unknown setting 'hiden_dims'.*Did you mean 'hidden_dims'": lambda: read(hiden_dims=[8]),
        "Unknown activation 'selu'": lambda: read(activation="selu"),
        "Unknown actor 'RNNModel'": lambda: read(class_name="rsl_rl.models.RNNModel"),
        "Unknown distribution 'BetaDistribution'": lambda: read(distribution_cfg={"class_name": "BetaDistribution"}),
        r"hidden layers \(8, 5\), its configuration \(8,\)": lambda: read(hidden_dims=[8]),
        "has observation statistics, unlike its configuration": lambda: read(obs_normalization=False),
        "has 'rnn.weight', expected plain layers": lambda: read(
            {"actor_state_dict": {**weights, "rnn.weight": torch.zeros(1)}}
        ),
        "holds more than tensors": lambda: read({"actor_state_dict": Path("x")}),
        "is not a model of rsl_rl: it has weights": lambda: read({"weights": {}}),
        "has 6 inputs, but state 5, goal 2 makes 7": lambda: read(shapes={"state": (5,), "goal": (2,)}),
        "no actor with squash=True": lambda: runner_config(
            GaussianConfig(squash=True, action_normalization="minmax"), spec
        ),
        "chunks, a history or a hidden state": lambda: runner_config(
            GaussianConfig(), PolicySpec(SHAPES, 3, horizon=2)
        ),
        "must predict the logarithm of its standard deviation": lambda: read(
            distribution_cfg={"class_name": "HeteroscedasticGaussianDistribution"}
        ),
    }
    for message, call in refusals.items():
        with pytest.raises(UserError, match=message) as refusal:
            call()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": {"init_noise_std": 0}}, r"policy.init_noise_std must be positive"),
        ({"policy": {"init_noise_std": "x"}}, r"policy.init_noise_std must be a value of type float, found 'x'"),
        ({"policy": {"actor_hidden_dims": None}}, r"policy.actor_hidden_dims must be a list, found None"),
        ({"policy": {"actor_hidden_dims": "256"}}, r"policy.actor_hidden_dims must be a list, found '256'"),
        ({"policy": {}, "obs_groups": ["policy"]}, r"'obs_groups' of .* must map 'actor'"),
        ({"policy": {}, "obs_groups": {"policy": "policy"}}, r"'obs_groups' of .* must map 'actor'"),
        ({"actor": {"distribution_cfg": 5}}, r"actor.distribution_cfg must be a mapping, found 5"),
        ({"actor": {"distribution_cfg": {"std_range": None}}}, r"std_range must be a list, found None"),
        (
            {"actor": {"distribution_cfg": {"std_range": [1]}}},
            r"std_range must be two ascending numbers, found \[1.0\]",
        ),
    ],
)
def test_settings_of_a_wrong_type_or_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        read_config(settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([1], "must be a mapping of names to tensors, found list"),
        ({"std": 1.0}, "'std' of .* must be a tensor of numbers with a name, found float"),
        ({"std": torch.ones(4)}, r"'log_std' of .* has shape \(1, 4\), expected \(1, 3\)"),
        ({"mlp.4.bias": None}, r"'mlp.4' of .* has no bias"),
        ({"mlp.0.weight": torch.zeros(8)}, r"'mlp.0' of .* is no linear layer, it has weight \(8,\) and bias \(8,\)"),
        ({"mlp.2.weight": torch.zeros(5, 7)}, r"A layer of .* has 7 inputs after one of 8 outputs"),
        ({"mlp.4.weight": torch.zeros(0, 5), "mlp.4.bias": torch.zeros(0)}, r"'mlp.4' of .* is no linear layer"),
        ({"obs_normalizer._std": None}, "has 6 means and 0 deviations of 6 observations"),
        ({"obs_normalizer._mean": torch.zeros(1, 5)}, "has 5 means and 6 deviations of 6 observations"),
        ({"obs_normalizer._mean": torch.full((1, 6), torch.nan)}, "must be 6 finite numbers"),
        ({"obs_normalizer._std": torch.full((1, 6), -1.0)}, "deviation that is not positive"),
    ],
)
def test_damaged_weights_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    content, config = layouts()["4"]
    weights = content["actor_state_dict"]
    if isinstance(changes, dict):
        changes = {name: value for name, value in {**weights, **changes}.items() if value is not None}
    torch.save({"actor_state_dict": changes}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=message) as refusal:
        read_actor(tmp_path / "model.pt", read_config({**config, "obs_groups": {"actor": list(GROUPS)}}), SHAPES)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "content", [{"model_state_dict": [3]}, {"model_state_dict": {}, "obs_norm_state_dict": torch.ones(2)}]
)
def test_older_files_without_mappings_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(UserError, match="must be a mapping of names to tensors, found"):
        read_actor(tmp_path / "model.pt", read_config({"policy": OLD}), SHAPES)


def test_rsl_rl_model_computes_the_same_actions(tmp_path: Path) -> None:
    models = pytest.importorskip("rsl_rl.models", reason="needs robopolicy[rslrl]")
    groups = importlib.import_module("tensordict").TensorDict(
        {key: value[:, 0] for key, value in OBS.items()}, batch_size=[7]
    )
    actor = models.MLPModel(
        groups, {"actor": list(GROUPS)}, "actor", 3, [8, 5], "elu", True, {"class_name": "GaussianDistribution"}
    )
    actor.train()
    actor.update_normalization(groups)
    torch.save({"actor_state_dict": actor.state_dict()}, tmp_path / "model.pt")
    settings = {"actor": {**PLAIN, "distribution_cfg": {"class_name": "GaussianDistribution"}}}
    policy = read_actor(tmp_path / "model.pt", read_config({**settings, "obs_groups": {"actor": list(GROUPS)}}), SHAPES)
    torch.testing.assert_close(policy.act(OBS, deterministic=True)[:, 0], actor(groups))
    ours = runner_config(policy.config, policy.spec)
    ours["actor"].pop("class_name")
    again = models.MLPModel(groups, ours["obs_groups"], "actor", 3, **ours["actor"])
    again.load_state_dict(actor_state(policy), strict=True)
    torch.testing.assert_close(again(groups), actor(groups))


def test_our_simulator_runs_in_rsl_rls_runner(tmp_path: Path) -> None:
    runners = pytest.importorskip("rsl_rl.runners", reason="needs robopolicy[rslrl]")
    from robopolicy.interop.rsl_rl import RslVecEnv

    sim, reference = (make_sim("toy/point_mass", SimOptions(num_envs=4, reward="shaped")) for _ in range(2))
    env = RslVecEnv(sim)
    reference.reset(0)
    ended = 0
    for _ in range(60):
        action = torch.rand(4, 2) * 2 - 1
        obs, reward, dones, extras = env.step(action)
        step = reference.step(action)
        assert torch.equal(obs["state"], step.obs["state"]) and torch.equal(reward, step.reward)
        assert torch.equal(dones > 0, step.done)
        assert torch.equal(extras["time_outs"], step.truncated & ~step.terminated)
        ended += int(dones.sum())
    assert ended
    config = GaussianConfig(hidden=(8,), normalization="meanstd")
    spec = PolicySpec({"state": (6,)}, 2)
    algorithm = {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 1, "rnd_cfg": None}
    settings = {"num_steps_per_env": 8, "save_interval": 10, "algorithm": {**algorithm, "symmetry_cfg": None}}
    settings |= {**runner_config(config, spec), "multi_gpu": None}
    kept = runner_config(config, spec)
    runner = runners.OnPolicyRunner(env, settings, log_dir=None, device="cpu")
    with pytest.raises(UserError, match="init_at_random_ep_len=False"):
        runner.learn(1, init_at_random_ep_len=True)
    runner.learn(2)
    runner.save(str(tmp_path / "model.pt"))
    policy = read_actor(tmp_path / "model.pt", read_config(kept), {"state": (6,)})
    obs = env.get_observations()
    reference_actions = runner.get_inference_policy()(obs)
    torch.testing.assert_close(
        policy.act({"state": obs["state"][:, None]}, deterministic=True)[:, 0], reference_actions
    )
    write_actor(policy, tmp_path / "ours.pt")
    with torch.inference_mode():  # rsl_rl 5.4 creates the statistics, overwritten here, in inference mode
        runner.load(str(tmp_path / "ours.pt"), load_cfg={"actor": True})
    torch.testing.assert_close(runner.get_inference_policy()(obs), reference_actions)
