"""Tests of ACT from and to LeRobot; the part that needs `lerobot` itself runs by `make test-lerobot`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.interop.lerobot.act import read_act, write_act
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.interop.lerobot.source import open_source
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.act import ACTConfig, ACTPolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint

VISION = VisionConfig(kind="resnet18", crop=1.0, shared=True)
SMALL = ACTConfig(width=16, attention_heads=2, feedforward=16, encoder_layers=1, posterior_layers=1, vision=VISION)
SHAPES = {"state": (3,), "image.front": (3, 32, 48), "image.wrist": (3, 32, 48)}
SPEC = PolicySpec(SHAPES, action_dim=2, horizon=5, action_horizon=3)


def ours(spec: PolicySpec = SPEC, config: ACTConfig = SMALL) -> ACTPolicy:
    """A policy with random weights, constants of the camera network and statistics."""
    torch.manual_seed(0)
    policy = ACTPolicy(config, spec)
    known = {"mean": torch.randn(3), "std": torch.rand(3) + 0.5}
    statistics = {"state": known, "action": {name: value[:2] for name, value in known.items()}}
    policy.fit_normalizer(statistics | {"environment_state": {"mean": torch.zeros(3), "std": torch.ones(3)}})
    for name, value in policy.named_buffers():
        if ".bn" in name or "downsample" in name:
            value.uniform_(0.5, 1.5)
    return policy.eval()


def observed(spec: PolicySpec = SPEC) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        key: torch.randint(0, 256, (3, 1, *shape), generator=draw, dtype=torch.uint8)
        if key.startswith("image.")
        else torch.randn(3, 1, *shape, generator=draw)
        for key, shape in spec.observation.items()
    }


def test_a_policy_survives_lerobots_files(tmp_path: Path) -> None:
    policy = ours()
    write_act(policy, tmp_path / "act")
    again = load_lerobot(tmp_path / "act", action_horizon=4)
    assert isinstance(again, ACTPolicy) and again.spec == replace(SPEC, action_horizon=4)
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=1e-7, rtol=1e-6, msg=name)
    torch.testing.assert_close(again.act(observed()), policy.act(observed()), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="exists"):
        write_act(policy, tmp_path / "act")
    write_act(policy, tmp_path / "act", overwrite=True)


def test_an_imported_act_is_a_checkpoint_that_trains(tmp_path: Path) -> None:
    write_act(ours(), tmp_path / "act")
    policy = load_lerobot(tmp_path / "act")
    save_checkpoint(tmp_path / "ckpt", policy, task="toy/point_mass", obs_sample=observed())
    again, _ = load_policy(tmp_path / "ckpt")
    assert torch.equal(again.act(observed()), policy.act(observed()))
    again.train().imitation_loss(observed(), torch.zeros(3, 5, 2))[0].sum().backward()
    assert all(value.grad is not None for value in again.parameters())


def test_a_checkpoint_is_exported_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "ckpt", ours(), task="toy/point_mass", obs_sample=observed())
    out = str(tmp_path / "act")
    assert main(["export", str(tmp_path / "ckpt"), "--lerobot", "--out", out]) == 0
    assert "LeRobot policy" in capsys.readouterr().out
    assert isinstance(load_lerobot(out), ACTPolicy)
    assert main(["export", str(tmp_path / "ckpt"), "--lerobot", "--rtc", "--out", out]) == 2


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (replace(SPEC, obs_horizon=2), SMALL, "observes several steps"),
        (replace(SPEC, observation={"state": (3,)}), SMALL, "observes neither a camera nor environment_state"),
        (SPEC, replace(SMALL, vision=replace(VISION, kind="resnet", widths=(16,))), "cameras of kind resnet; train"),
        (SPEC, replace(SMALL, vision=replace(VISION, crop=0.9)), "crops images; train with vision.crop=1"),
        (SPEC, replace(SMALL, vision=replace(VISION, shared=False)), "has a network per camera; train"),
        (SPEC, replace(SMALL, action_normalization="identity"), "scaled by another rule than meanstd"),
    ],
)
def test_policies_that_lerobot_lacks_are_not_written(
    spec: PolicySpec, config: ACTConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        write_act(ours(spec, config), tmp_path / "act")
    assert not (tmp_path / "act").exists()


def test_damaged_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "act"
    write_act(ours(), folder)
    weights = load_file(folder / "model.safetensors")
    head = "model.action_head.weight"
    for change, message in (
        ({head: None}, f"lacks weight '{head}'"),
        ({"model.new": torch.zeros(1)}, "has weight 'model.new', which is unknown"),
        ({head: torch.zeros(3, 3)}, f"Weight '{head}' of .* does not fit"),
        ({head: torch.full_like(weights[head], torch.nan)}, f"Weight '{head}' of .* is not finite"),
    ):
        changed = {name: value for name, value in (weights | change).items() if value is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(UserError, match=message):
            load_lerobot(folder)


def test_other_networks_have_no_counterpart(tmp_path: Path) -> None:
    folder = tmp_path / "act"
    write_act(ours(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pre_norm": True}))
    with pytest.raises(UserError, match="has pre_norm=True, which the policy act lacks"):
        read_act(open_source(str(folder)))


def theirs(policy: Any, folder: Path, obs: dict[str, Tensor], **more: Tensor) -> tuple[Any, Any]:
    """Output of lerobot's processors for `obs`, and its postprocessor."""
    from lerobot.policies.factory import make_pre_post_processors

    before, after = make_pre_post_processors(policy.config, pretrained_path=str(folder))
    batch = {f"observation.{key.replace('image.', 'images.')}": value[:, 0].float() for key, value in obs.items()}
    batch = {key: value / 255 if ".images." in key else value for key, value in batch.items()}
    return before(batch | more), after


def load_theirs(folder: Path, **settings: Any) -> Any:
    factory = pytest.importorskip("lerobot.policies.factory", reason="needs robopolicy[lerobot]: make test-lerobot")
    from lerobot.configs.policies import PreTrainedConfig

    config = PreTrainedConfig.from_pretrained(folder, cli_overrides=["--device=cpu"])
    for name, value in settings.items():
        setattr(config, name, value)
    return factory.get_policy_class("act").from_pretrained(folder, config=config, strict=True)


@pytest.mark.parametrize("key", ["image.front", "environment_state"])
def test_lerobot_and_ours_give_the_same_chunk(key: str, tmp_path: Path) -> None:
    extra = {"environment_state": (3,)} if key == "environment_state" else SHAPES
    policy = ours(replace(SPEC, observation={"state": (3,)} | extra))
    write_act(policy, tmp_path / "act")
    saved, obs = load_theirs(tmp_path / "act").eval(), observed(policy.spec)
    batch, after = theirs(saved, tmp_path / "act", obs)
    torch.testing.assert_close(after(saved.predict_action_chunk(batch)), policy.act(obs), atol=1e-5, rtol=0)
    saved.save_pretrained(tmp_path / "again")  # without processors, which are copied
    for file in (tmp_path / "act").glob("policy_*"):
        (tmp_path / "again" / file.name).write_bytes(file.read_bytes())
    assert torch.equal(load_lerobot(tmp_path / "again").act(obs), load_lerobot(tmp_path / "act").act(obs))


def test_lerobot_and_ours_have_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ours(config=replace(SMALL, dropout=0.0)).train()
    write_act(policy, tmp_path / "act")
    saved, obs, chunk = load_theirs(tmp_path / "act").train(), observed(), torch.randn(3, 5, 2)
    batch, _ = theirs(saved, tmp_path / "act", obs, action=chunk, action_is_pad=torch.zeros(3, 5, dtype=torch.bool))
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    monkeypatch.setattr("robopolicy.policies.heads.act.normal", lambda shape, *_: torch.zeros(shape))
    batch["action_is_pad"] = torch.zeros(3, 5, dtype=torch.bool)
    expected, parts = saved(batch)
    loss, info = policy.imitation_loss(obs, chunk)
    torch.testing.assert_close(loss.mean(), expected, atol=1e-4, rtol=1e-5)
    assert float(info["l1"]) == pytest.approx(parts["l1_loss"], abs=1e-5)
