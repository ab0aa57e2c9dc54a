"""Tests of settings that nothing reads: `robopolicy train` refuses them with one line."""

import dataclasses
from pathlib import Path

import pytest
import torch
from replay_runs import assert_refused

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.constraints import check_count
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.resources import folder
from robopolicy.schema import reject_unused
from robopolicy.sim.contract import TensorSpec
from robopolicy.training.build import build, resolve_config
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.compose import compose_config
from robopolicy.training.config import ChunkConfig, ReplayConfig, TaskConfig
from robopolicy.training.make_source import SOURCES
from robopolicy.training.unused_settings import check_unused, check_unused_encoders, check_unused_sizes

PPO = ["task=point_mass", "algorithm=ppo", "policy=gaussian"]
SAC = ["task=point_mass", "algorithm=sac", "policy=squashed_gaussian"]
BC = ["task=point_mass", "algorithm=bc", "policy=flow", "dataset=data"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [*BC, "replay.capacity=500"],
            "replay.capacity=500 has no effect with algorithm=bc, which has no replay; leave it out (default: ",
        ),
        ([*PPO, "replay.learning_starts=10"], "replay.learning_starts=10 has no effect with algorithm=ppo"),
        ([*PPO, "replay.offline_fraction=null"], "replay.offline_fraction=null has no effect with algorithm=ppo"),
        ([*PPO, "replay.hindsight.strategy=final"], "replay.hindsight.strategy=final has no effect with algorithm=ppo"),
        (
            [*SAC, "replay.hindsight.fraction=0.5"],
            "hindsight.fraction=0.5 has no effect with replay.hindsight.strategy",
        ),
        ([*SAC, "sim.worker_backend=ray"], "sim.worker_backend=ray has no effect with sim.num_workers=0; leave it out"),
        ([*PPO, "sim.weights_every=4"], "sim.weights_every=4 has no effect with sim.num_workers=0"),
        ([*PPO, "evaluation.held_out=0.3"], "evaluation.held_out=0.3 has no effect with task=toy/point_mass; episodes"),
        ([*PPO, "policy.unet_channels=[8,16]"], "policy.unet_channels=[8,16] has no effect with policy.backbone=mlp"),
        (
            [*BC, "policy=flow_unet", "policy.transformer_width=64"],
            "transformer_width=64 has no effect with policy.back",
        ),
        (
            [*BC, "policy=flow_transformer", "policy.unet_kernel=3"],
            "unet_kernel=3 has no effect with policy.backbone=tr",
        ),
        (
            [*BC, "task=none", "task.image_size=96"],
            "task.image_size=96 has no effect with task=none, which has the obs",
        ),
        (
            [*BC, "task=none", "evaluation.episodes=0", "evaluation.held_out=0.3"],
            "evaluation.held_out=0.3 has no effect with evaluation.episodes=0",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        resolve_config(compose_config([*settings, "budget.updates=1"]))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_command_line_ends_with_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "error: replay.capacity=500 has no effect with algorithm=bc, which has no replay"
    assert_refused([*BC, "budget.updates=1", "replay.capacity=500"], message, tmp_path, capsys)


@pytest.mark.parametrize(
    "settings",
    [
        [*PPO, "replay.capacity=1000000", "sim.weights_every=1", "task.image_size=64"],  # the defaults
        [*SAC, "replay.capacity=5000", "replay.hindsight.strategy=future", "replay.hindsight.fraction=0.5"],
        [*SAC, "sim.num_workers=2", "sim.worker_backend=ray", "sim.weights_every=4"],
        [*BC, "task=none", "evaluation.held_out=0.3"],
        [*BC, "policy=flow_unet", "policy.unet_channels=[8,16]"],
        [*BC, "policy=flow_transformer", "policy.transformer_width=64"],
        [*PPO, "policy=autoregressive", "policy.transformer_width=64"],
    ],
)
def test_a_setting_that_is_read_is_accepted(settings: list[str]) -> None:
    resolve_config(compose_config([*settings, "budget.updates=1"]))


@pytest.mark.parametrize("setting", ["policy.vision.crop=0.5", "policy.point_cloud.features=8", "task.image_size=96"])
def test_a_setting_of_an_input_that_the_policy_lacks_is_refused(setting: str) -> None:
    settings = [*PPO, "budget.updates=1", "evaluation.episodes=0", setting]
    with pytest.raises(UserError, match=rf"{setting} has no effect with"):
        build(resolve_config(compose_config(settings)))


def test_settings_of_encoders_need_an_observation_of_their_kind() -> None:
    config = compose_config([*PPO, "policy.vision.crop=0.5", "policy.embedding.width=8"])
    check_unused_encoders(config, ["state", "image.front", "embedding.text"])
    with pytest.raises(UserError, match=r"policy.embedding.width=8 has no effect with a policy that observes no 'emb"):
        check_unused_encoders(config, ["state", "image.front"])


@pytest.mark.parametrize("policy", ["act", "flow", "gaussian", "text"])
def test_the_defaults_of_a_policy_are_accepted_without_images(policy: str) -> None:
    check_unused_encoders(compose_config([f"policy={policy}"]), ["state"])


def test_sizes_of_images_and_clouds_need_a_camera_or_an_observation() -> None:
    image = {"image.front": TensorSpec((3, 96, 96), torch.uint8)}
    check_unused_sizes(TaskConfig(image_size=96), image)  # a task may show images by itself
    check_unused_sizes(TaskConfig(image_size=96, cameras=("front",)), {})  # a wrapper may replace the images
    check_unused_sizes(TaskConfig(points=32, point_clouds=("front",)), {})
    with pytest.raises(UserError, match=r"task.points=32 has no effect without task.point_clouds; leave it out"):
        check_unused_sizes(TaskConfig(points=32), image)


def image_checkpoint(folder: Path) -> Path:
    """A policy that observes images of 24 x 24 pixels."""
    spec = PolicySpec({"state": (3,), "image.front": (3, 24, 24)}, action_dim=8, horizon=2)
    settings = FlowConfig(
        hidden=(8,), unet_channels=(8,), normalization="identity", action_normalization="identity"
    )  # sizes in a checkpoint are no settings of the run
    obs = {"state": torch.zeros(1, 1, 3), "image.front": torch.zeros(1, 1, 3, 24, 24, dtype=torch.uint8)}
    save_checkpoint(folder / "ckpt", FlowPolicy(settings, spec), task="manipulation/lift", obs_sample=obs)
    return folder / "ckpt"


def test_the_checkpoint_sets_the_size_of_the_images(tmp_path: Path) -> None:
    start = ["algorithm=reinflow", f"init_from={image_checkpoint(tmp_path)}", "budget.updates=1"]
    with pytest.raises(UserError, match=r"task.image_size=96 has no effect with init_from, whose policy sets it"):
        resolve_config(compose_config([*start, "task.image_size=96"]))
    resolved = resolve_config(compose_config([*start, "task.image_size=24"]))
    assert resolve_config(resolved) == resolved  # a sweep resolves twice


def test_a_run_without_a_task_resolves_twice_from_a_policy_that_observes_images(tmp_path: Path) -> None:
    start = ["algorithm=bc", f"init_from={image_checkpoint(tmp_path)}", "task=none", "dataset=data", "budget.updates=1"]
    resolved = resolve_config(compose_config(start))
    assert resolve_config(resolved) == resolved


@pytest.mark.parametrize("name", [path.stem for path in sorted(folder("configs").glob("experiment/*.yaml"))])
def test_no_preset_has_a_setting_that_nothing_reads(name: str) -> None:
    check_unused(compose_config([f"experiment={name}"]))


def test_sources_of_plugins_may_read_the_settings_of_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        """A source that does not state whether it uses replay."""

        whole_episodes = False

    monkeypatch.setitem(SOURCES._rows, "own", Source)
    monkeypatch.setattr(ALGORITHMS["ppo"], "data_source", "own")
    check_unused(compose_config([*PPO, "replay.capacity=500"]))


def test_nested_settings_are_named_in_full() -> None:
    replay = dataclasses.replace(ReplayConfig(), device="cpu")
    reject_unused(replay, "replay", "here", "capacity")
    with pytest.raises(UserError, match=r"^replay.device=cpu has no effect here; leave it out \(default: auto\)\.$"):
        reject_unused(replay, "replay", "here")


def test_only_chunks_have_the_longest_horizon() -> None:
    check_count("--horizon", 5000, 1)
    for name in ("horizon", "obs_horizon"):
        with pytest.raises(UserError, match=f"{name} must be at most 4096, got 4097"):
            ChunkConfig(**{name: 4097})
