"""Tests of Stable-Baselines3 import and export: imported models act the same, and its evaluation runs our policies."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import PolicyExpert
from robopolicy.evaluation.harness import evaluate
from robopolicy.interop.sb3_actor import from_model, read_model
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy, save_checkpoint

sb3 = pytest.importorskip("stable_baselines3", reason="needs robopolicy[sb3]")
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

from robopolicy.interop.stable_baselines3 import Predictor, SimVecEnv, wrap_model  # noqa: E402

OBS = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)


def simulator(num_envs: int = 4) -> VectorSim:
    return make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped"))


def model_of(kind: str, **settings: Any) -> Any:
    """A model with perturbed weights, so that its actions depend on the observation."""
    env: Any = SimVecEnv(simulator())
    if settings.pop("normalized", False):
        env = VecNormalize(env)
    model = getattr(sb3, kind)("MlpPolicy", env, device="cpu", seed=0, **settings)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


MODELS = {
    "PPO": {},
    "A2C": {"policy_kwargs": {"net_arch": [16, 8]}},
    "SAC": {},
    "TD3": {},
    "DDPG": {"policy_kwargs": {"net_arch": [32]}},
    "PPO-elu": {"policy_kwargs": {"activation_fn": torch.nn.ELU, "net_arch": {"pi": [32], "vf": [8]}}},
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_loads_without_unpickling(name: str, tmp_path: Path) -> None:
    model = model_of(name.split("-")[0], **MODELS[name])
    model.save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as whole, zipfile.ZipFile(tmp_path / "bare.zip", "w") as bare:
        data = json.loads(whole.read("data"))
        for entry in data.values():
            if isinstance(entry, dict) and ":serialized:" in entry:
                entry[":serialized:"] = "this would fail if anybody opened it"
        bare.writestr("data", json.dumps(data))
        bare.writestr("policy.pth", whole.read("policy.pth"))
    actions, _ = model.predict(OBS, deterministic=True)
    for policy in (read_model(tmp_path / "bare.zip"), from_model(model)):
        assert policy.spec == PolicySpec({"state": (6,)}, 2)
        ours, _ = Predictor(policy, model.action_space).predict(OBS, deterministic=True)
        np.testing.assert_allclose(ours, actions, atol=2e-6)


def test_log_probabilities_equal_sb3() -> None:
    obs, seen = {"state": torch.from_numpy(OBS)[:, None]}, torch.from_numpy(OBS)
    model = model_of("PPO")
    policy = from_model(model)
    sampled = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    _, logp, entropy = model.policy.evaluate_actions(seen, sampled.chunk[:, 0])
    torch.testing.assert_close(sampled.logp[:, 0], logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(policy.decisions(obs, sampled.record).entropy[:, 0], entropy, rtol=1e-5, atol=1e-5)
    model = model_of("SAC")
    policy = from_model(model)
    mean, log_std = policy.distribution(obs)
    reference = model.policy.actor.get_action_dist_params(seen)
    torch.testing.assert_close(mean[:, 0], reference[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_std[:, 0], reference[1], rtol=1e-5, atol=1e-5)


def test_normalization_statistics_are_imported_and_required_for_a_zip(tmp_path: Path) -> None:
    model = model_of("PPO", normalized=True, n_steps=16, batch_size=16, n_epochs=1)
    model.learn(64)
    normalize = model.get_vec_normalize_env()
    actions, _ = model.predict(normalize.normalize_obs(5 * OBS), deterministic=True)
    for policy in (from_model(model), wrap_model("normalised", model)):
        ours, _ = Predictor(policy, model.action_space).predict(5 * OBS, deterministic=True)
        np.testing.assert_allclose(ours, actions, atol=1e-5)
    model.save(tmp_path / "model.zip")
    with pytest.raises(UserError, match=r"behind a VecNormalize, whose statistics are missing .*sb3_actor.from_model"):
        read_model(tmp_path / "model.zip")


def test_sb3_evaluation_of_original_and_imported_model_equals_ours() -> None:
    model = model_of("PPO")
    policy = from_model(model)
    scores = []
    for candidate in (model, Predictor(policy, model.action_space)):
        env = SimVecEnv(simulator())
        env.seed(100)
        scores.append(evaluate_policy(candidate, env, n_eval_episodes=4, return_episode_rewards=True, warn=False))
    np.testing.assert_allclose(scores[0][0], scores[1][0], rtol=1e-5)
    assert scores[0][1] == scores[1][1]
    result = evaluate(policy, simulator(), episodes=4, seed=100)
    np.testing.assert_allclose(sorted(result.returns), sorted(scores[0][0]), rtol=1e-4)
    wrapped = evaluate(wrap_model("boxed", model), simulator(), episodes=4, seed=100)
    np.testing.assert_allclose(wrapped.returns, result.returns, rtol=1e-4)


@pytest.mark.parametrize("action_horizon", [1, 3])
def test_policies_with_chunks_and_histories_score_the_same_in_sb3_and_our_evaluation(action_horizon: int) -> None:
    torch.manual_seed(0)
    spec = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=action_horizon, obs_horizon=2)
    policy = GaussianPolicy(GaussianConfig(normalization="identity", orthogonal_init=False), spec)
    env = SimVecEnv(simulator())
    env.seed(7)
    reference = evaluate_policy(Predictor(policy), env, n_eval_episodes=4, return_episode_rewards=True, warn=False)
    ours = evaluate(policy, simulator(), episodes=4, seed=7)
    np.testing.assert_allclose(np.sort(ours.returns), np.sort(reference[0]), rtol=1e-5)
    np.testing.assert_array_equal(np.sort(ours.lengths), np.sort(reference[1]))


def test_imported_model_round_trips_through_a_checkpoint(tmp_path: Path) -> None:
    model = model_of("SAC")
    policy = from_model(model)
    obs = {"state": torch.from_numpy(OBS)[:, None]}
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=obs)
    loaded, _ = load_policy(tmp_path / "c")
    assert isinstance(loaded, GaussianPolicy)
    assert torch.equal(loaded.act(obs, deterministic=True), policy.act(obs, deterministic=True))


def test_wrapped_model_acts_as_an_expert() -> None:
    model, sim = model_of("DDPG"), simulator()
    expert = PolicyExpert(wrap_model("ddpg", model))
    obs = sim.reset(0)
    actions = expert(sim, obs)
    np.testing.assert_allclose(actions, model.predict(obs["state"].numpy(), deterministic=True)[0], atol=1e-6)


def test_chunks_and_histories_are_stored_per_row_until_an_episode_starts() -> None:
    seen: list[torch.Tensor] = []

    class Spy(FlowPolicy):
        def act(self, obs: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(obs["state"][:, :, 0])
            steps = torch.arange(4.0).view(1, 4, 1)
            return obs["state"][:, -1:, :1] * 10 + steps.expand(len(obs["state"]), 4, 2)

    predictor = Predictor(Spy(FlowConfig(), PolicySpec({"state": (1,)}, 2, horizon=4, action_horizon=3, obs_horizon=2)))
    executed, state = [], None
    for step in range(5):
        obs = np.full((2, 1), step, np.float32)
        starts = np.array([step == 0, step in (0, 2)])
        action, state = predictor.predict(obs, state, starts)
        executed.append(action[:, 0].tolist())
    assert executed == [[0, 0], [1, 1], [2, 20], [30, 21], [31, 22]]
    assert [history.tolist() for history in seen] == [[[0, 0], [0, 0]], [[2, 2]], [[2, 3]]]


def test_predictor_accepts_single_observations_and_images() -> None:
    flow = FlowPolicy(
        FlowConfig(normalization="identity", action_normalization="identity"), PolicySpec({"state": (6,)}, 2)
    )
    one, _ = Predictor(flow, seed=3).predict(OBS[0])
    many, _ = Predictor(flow, seed=3).predict(OBS[:1])
    assert one.shape == (2,) and np.array_equal(one, many[0])
    with pytest.raises(UserError, match=r"expects 'state' of shape \(6,\), found \(5,\)"):
        Predictor(flow).predict(OBS[:, :5])
    with pytest.raises(UserError, match="needs the observation 'state', found pose"):
        Predictor(flow).predict({"pose": OBS})

    class Bright(FlowPolicy):
        def act(self, obs: Any, **kwargs: Any) -> torch.Tensor:
            return obs["image.front"][:, 0, :2, 0, 0].float()[:, None]

    spec = PolicySpec({"image.front": (3, 5, 4), "state": (1,)}, 2)
    images = np.random.default_rng(0).integers(0, 255, (2, 5, 4, 3), dtype=np.uint8)
    action, _ = Predictor(Bright(FlowConfig(), spec)).predict({"image.front": images, "state": np.zeros((2, 1))})
    np.testing.assert_array_equal(action, images[:, 0, 0, :2])


def test_unsupported_models_are_refused_with_an_alternative(tmp_path: Path) -> None:
    for kind, message in [("PPO", "gSDE"), ("SAC", r"'actor\.log_std' .* belongs to no plain actor")]:
        model_of(kind, use_sde=True).save(tmp_path / "model.zip")
        with pytest.raises(UserError, match=f"{message}.*wrap_model"):
            read_model(tmp_path / "model.zip")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(UserError, match="not a model of Stable-Baselines3"):
        read_model(tmp_path / "text.zip")
    with pytest.raises(UserError, match="cannot be read"):
        read_model(tmp_path / "absent.zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("data", "{}")
    with pytest.raises(UserError, match=r"not a model of Stable-Baselines3: .*policy\.pth"):
        read_model(tmp_path / "empty.zip")
    discrete = sb3.DQN("MlpPolicy", "CartPole-v1", device="cpu")
    discrete.save(tmp_path / "dqn.zip")
    with pytest.raises(UserError, match=r"action_space .* expected a Box"):
        read_model(tmp_path / "dqn.zip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor.mu.bias": None}, r"'actor\.mu' of .* has no bias"),
        ({"actor.latent_pi.0.bias": None}, r"'actor\.latent_pi\.0' of .* has no bias"),
        ({"actor.mu.weight": 5}, r"'actor\.mu\.weight' of .* must be a tensor of numbers with a name, found int"),
        ({5: torch.zeros(1)}, "'5' of .* must be a tensor of numbers with a name"),
        ({"actor.latent_pi.0.weight": torch.zeros(4)}, r"is no linear layer, it has weight \(4,\) and bias \(4,\)"),
        ({"actor.mu.weight": torch.zeros(2, 9)}, "'actor.mu' and 'actor.log_std' of .* have different shapes"),
        ({"actor.latent_pi.0.weight": torch.zeros(4, 0)}, "is no linear layer"),
    ],
)
def test_damaged_weights_are_refused(changes: dict[Any, Any], message: str, tmp_path: Path) -> None:
    names = {"actor.latent_pi.0": (4, 3), "actor.mu": (2, 4), "actor.log_std": (2, 4)}
    weights: dict[Any, Any] = {f"{name}.weight": torch.zeros(shape) for name, shape in names.items()}
    weights |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in names.items()}
    box = {":type:": "Box", "low": "[-1. -1.]", "high": "[1. 1.]"}

    def read(weights: dict[Any, Any]) -> GaussianPolicy:
        with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
            archive.writestr("data", json.dumps({"observation_space": box, "action_space": box}))
            with archive.open("policy.pth", "w") as file:
                torch.save(weights, file)
        return read_model(tmp_path / "model.zip")

    assert read(weights).spec == PolicySpec({"state": (3,)}, 2)
    with pytest.raises(UserError, match=message) as refusal:
        read({name: value for name, value in {**weights, **changes}.items() if value is not None})
    assert "\n" not in str(refusal.value)


def test_pickled_objects_among_the_weights_are_refused(tmp_path: Path) -> None:
    model_of("PPO").save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as whole, zipfile.ZipFile(tmp_path / "evil.zip", "w") as evil:
        evil.writestr("data", whole.read("data"))
        with evil.open("policy.pth", "w") as file:
            torch.save({"action_net.weight": Path("anything")}, file)
    with pytest.raises(UserError, match="holds more than tensors and plain values"):
        read_model(tmp_path / "evil.zip")
