"""Tests of LeRobot policies as black boxes against LeRobot's own loop; `make test-lerobot` runs them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lerobot.policies", reason="needs robopolicy[lerobot]: make test-lerobot")

from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot_saved import CAMERA, DIMS, SIZE, STATE, features, statistics

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.black_box import LeRobotBlackBox
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "act": {"chunk_size": 6, "n_action_steps": 6, "pre_norm": True, "dim_model": 16, "n_heads": 2},
    "vqbet": {"n_obs_steps": 3, "n_action_pred_token": 3, "action_chunk_size": 4, "gpt_n_layer": 1, "gpt_n_head": 2,
              "gpt_hidden_dim": 16, "gpt_output_dim": 16, "gpt_input_dim": 16, "crop_shape": (28, 28),
              "spatial_softmax_num_keypoints": 4, "vqvae_embedding_dim": 8, "vqvae_enc_hidden_dim": 8,
              "vqvae_n_embed": 4, "use_group_norm": True},
}  # fmt: skip


def save(kind: str, folder: Path) -> tuple[Any, Any, Any]:
    """Save a policy with random weights; return it with its processors."""
    torch.manual_seed(0)
    config = make_policy_config(
        kind, device="cpu", push_to_hub=False, pretrained_backbone_weights=None, **features(camera=True), **KINDS[kind]
    )
    policy = get_policy_class(kind)(config).eval()
    stats = statistics()
    for parameter in policy.parameters():
        parameter.data.nan_to_num_(0.0)
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    for part in (policy, before, after):
        part.save_pretrained(folder)
    return policy, before, after


def stream(steps: int) -> dict[str, Tensor]:
    """Observations `(2, steps, ...)` of two episodes."""
    draw = torch.Generator().manual_seed(2)
    image = torch.randint(0, 256, (2, steps, 3, SIZE, SIZE), generator=draw, dtype=torch.uint8)
    return {"state": torch.randn(2, steps, DIMS, generator=draw), "image.front": image}


def lerobots_actions(policy: Any, before: Any, after: Any, obs: dict[str, Tensor]) -> Tensor:
    """Actions `(2, steps, A)` of lerobot's own loop."""
    policy.reset()
    found: list[Tensor] = []
    for step in range(obs["state"].shape[1]):
        batch = {STATE: obs["state"][:, step], CAMERA: obs["image.front"][:, step].float() / 255, "task": ["", ""]}
        with torch.no_grad():
            found.append(after(policy.select_action(before(batch))))
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_actions_of_lerobots_own_loop(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "multinomial", lambda weights, num_samples, **_: weights.topk(num_samples).indices)
    saved = save(kind, tmp_path / "p")
    policy = load_lerobot(tmp_path / "p")
    assert isinstance(policy, LeRobotBlackBox) and policy.spec.horizon > 1
    steps = policy.spec.action_horizon
    obs = stream(2 * steps)
    torch.manual_seed(0)
    expected = lerobots_actions(*saved, obs)
    history = policy.spec.obs_horizon
    for start in (0, steps):
        index = torch.arange(start - history + 1, start + 1).clamp(min=0)
        seen = {key: value[:, index] for key, value in obs.items()}
        chunk = policy.act(seen, generator=PerRowGenerator([0, 1], [0, 0]))
        torch.testing.assert_close(chunk[:, :steps], expected[:, start : start + steps], atol=1e-5, rtol=0)


def test_a_black_box_is_a_checkpoint_that_is_not_steered(tmp_path: Path) -> None:
    save("act", tmp_path / "p")
    policy, obs = load_lerobot(tmp_path / "p"), {key: value[:, :1] for key, value in stream(1).items()}
    save_checkpoint(tmp_path / "ckpt", policy, task="toy/point_mass", obs_sample=obs)
    assert verify_checkpoint(tmp_path / "ckpt").ok
    again, _ = load_policy(tmp_path / "ckpt")
    assert again.name == "lerobot" and torch.equal(again.act(obs), policy.act(obs))
    with pytest.raises(UserError, match="Steering needs a policy that takes noise, but 'lerobot' takes none"):
        LatentPolicy.from_base(again, NoiseSpace(), STEERING_ACTOR)
    with pytest.raises(TypeError, match="'lerobot' has no method decode"):
        again.decode(obs, torch.zeros(2, 6, 2))


def test_rows_do_not_depend_on_each_other_or_on_earlier_calls(tmp_path: Path) -> None:
    save("vqbet", tmp_path / "p")
    policy = load_lerobot(tmp_path / "p")
    obs = stream(policy.spec.obs_horizon)
    first = policy.act(obs, generator=PerRowGenerator([0, 1], [0, 0]))
    policy.act({key: value.flip(0) for key, value in obs.items()})
    again = policy.act(obs, generator=PerRowGenerator([0, 1], [0, 0]))
    assert torch.equal(first, again)


def test_policies_that_plan_no_chunk_give_single_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lerobot.policies.act.modeling_act import ACTPolicy

    saved = save("act", tmp_path / "p")

    def refuse(*_: Any) -> None:
        raise NotImplementedError

    obs = stream(1)
    expected = lerobots_actions(*saved, obs)
    predict = ACTPolicy.predict_action_chunk
    monkeypatch.setattr(ACTPolicy, "predict_action_chunk", refuse)
    from robopolicy.interop.lerobot.black_box import find_horizon
    from robopolicy.interop.lerobot.source import open_source

    assert find_horizon(open_source(str(tmp_path / "p"))) == 1
    monkeypatch.setattr(ACTPolicy, "predict_action_chunk", predict)
    monkeypatch.setattr("robopolicy.interop.lerobot.loading.find_horizon", lambda source: 1)
    policy = load_lerobot(tmp_path / "p")
    assert policy.spec.horizon == policy.spec.action_horizon == 1
    torch.testing.assert_close(policy.act(obs), expected, atol=1e-5, rtol=0)
