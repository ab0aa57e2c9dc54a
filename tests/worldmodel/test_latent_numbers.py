"""Tests of the latent world model by hand-computed numbers: noise levels, Euler steps, frame changes, memory."""

import pytest
import torch
from small_world import small_films, small_world

from robopolicy.policies.noise import PerRowGenerator
from robopolicy.worldmodel.contract import WorldState, first_frames
from robopolicy.worldmodel.latent import LatentWorldModel, LatentWorldModelConfig
from robopolicy.worldmodel.learner import LatentBatch, state_decoder_loss, state_loss
from robopolicy.worldmodel.videos import VideoDataset

CONTEXT, CELL = 4, (4, 2, 2)  # frames, and channels, height and width of a latent


@pytest.fixture(scope="module")
def videos() -> VideoDataset:
    return small_films(4)


@pytest.fixture
def model(videos: VideoDataset) -> LatentWorldModel:
    return small_world(videos)


def begin(model: LatentWorldModel, videos: VideoDataset, seeds: list[int]) -> WorldState:
    rows = list(range(len(seeds)))
    images, proprio = first_frames(videos.spec, {"top": videos.images["top"][rows]}, videos.proprio[rows])
    return model.reset(images, proprio, seeds=torch.tensor(seeds))


def test_noise_levels_are_embedded_as_a_quarter_of_their_logarithm(model: LatentWorldModel) -> None:
    seen: list[torch.Tensor] = []
    model.denoiser.noise.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    sigma = torch.tensor([4.0, -4.0]).exp()  # a quarter of the logarithm: 1 and -1
    model.denoiser(
        *(torch.zeros(2, *CELL), sigma, torch.zeros(2, CONTEXT, *CELL), torch.zeros(2, 4, 4), torch.zeros(2, 4, 2)),
        *(torch.zeros(2, 4), torch.zeros(2, *CELL)),
    )
    scales = torch.exp(torch.arange(16) * 4 / 15)
    expected = torch.stack([torch.cat([s * scales.sin(), scales.cos()]) for s in (1, -1)])
    assert torch.allclose(seen[0], expected, atol=1e-3)


def test_three_euler_steps_match_hand_computed_values(model: LatentWorldModel) -> None:
    """A new denoiser returns x / (1 + s^2), so every value at the noise levels 5, 1, 0.2 and 0 has a closed form."""
    assert LatentWorldModelConfig().sigmas == (5.0, 1.0, 0.2)
    empty = torch.zeros(1, CONTEXT, *CELL), torch.zeros(1, CONTEXT, 4), torch.zeros(1, CONTEXT, 2), torch.zeros(1, 4)
    change = model.sample(torch.ones(1, *CELL), *empty)
    x = 5.0
    x = x / 26 + (x - x / 26) * (1.0 / 5.0)
    x = x / 2 + (x - x / 2) * (0.2 / 1.0)
    assert x / 1.04 == pytest.approx(0.66568, abs=1e-5)
    assert torch.allclose(change, torch.full_like(change, x / 1.04))


def test_the_change_is_added_to_the_newest_frame_in_its_own_units(
    model: LatentWorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.change_std.fill_(0.5)
    model.proprio_change_std.fill_(0.1)
    model.proprio_change_mean.fill_(0.01)
    monkeypatch.setattr(model, "sample", lambda noise, *_: torch.full_like(noise, 2.0))
    monkeypatch.setattr(model, "state_change", lambda *_: torch.full((1, 4), 3.0))
    given = torch.arange(4.0)[None, :, None, None, None].expand(1, CONTEXT, *CELL)  # frames 0, 1, 2, 3
    proprio = 10 * torch.arange(4.0)[None, :, None].expand(1, CONTEXT, 4)
    latent, after, spread = model.draw(PerRowGenerator([0], [0]), given, proprio, torch.zeros(1, CONTEXT, 2))
    assert torch.allclose(latent, torch.full((1, 1, *CELL), 3.0 + 2.0 * 0.5))
    assert torch.allclose(after, torch.full((1, 1, 4), 30.0 + 3.0 * 0.1 + 0.01)) and not spread.any()


def test_the_state_network_learns_from_its_own_predictions(
    model: LatentWorldModel, videos: VideoDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that predicts the last change again, by hand for three steps; the last one is not real."""
    model.proprio_change_std.fill_(0.5)
    model.proprio_change_mean.fill_(1.0)
    model.proprio_mean.fill_(3.0)
    model.proprio_std.fill_(1.0)
    monkeypatch.setattr(model.state, "forward", lambda latent, past, actions: past[:, -1] - past[:, -2] + actions.sum())
    states = torch.tensor([0.0, 0.0, 0.0, 1.0, 4.0, 5.0, 9.0])[None, :, None].expand(1, 7, 4)
    actions = torch.zeros(1, 6, 2)
    real = torch.tensor([[True, True, False]])
    empty = torch.zeros(1, *CELL)
    batch = LatentBatch(empty[None], states, actions, empty, states, actions, real, empty, states[:, 0], empty[:, :2])
    loss, _ = state_loss(model, batch, torch.Generator(), 0.0)
    # Step 1: change 1 predicted, (4 - 1 - 1) / 0.5 = 4 true. State 1 + 0.5 + 1 = 2.5. Step 2: change 1.5 predicted,
    # (5 - 2.5 - 1) / 0.5 = 3 true. Huber's loss of an error above 1 is the error minus a half.
    assert loss.item() == pytest.approx(((4 - 1 - 0.5) + (3 - 1.5 - 0.5)) / 2)


def test_the_expected_change_leads_to_what_the_state_decoder_shows_at_the_next_state(
    model: LatentWorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.change_std.fill_(0.5)
    model.proprio_mean.fill_(4.0)
    model.proprio_std.fill_(2.0)
    model.proprio_change_mean.fill_(1.0)
    model.proprio_change_std.fill_(0.5)
    monkeypatch.setattr(model.state_decoder, "forward", lambda state: 2 * state[:, :1, None, None].expand(-1, *CELL))
    states = torch.full((1, CONTEXT, 4), 7.0)
    change = model.expected_change(torch.ones(1, CONTEXT, *CELL), states, torch.full((1, 4), 3.0))
    # The next state is 7 + 3 * 0.5 + 1 = 9.5, normalised 2.75, so that the latents are 5.5; the newest ones are 1.
    assert torch.allclose(change, torch.full((1, *CELL), (5.5 - 1) / 0.5))


def test_the_state_decoder_learns_the_latents_of_the_newest_frame(
    model: LatentWorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = torch.arange(7.0)[None, :, None].expand(1, 7, 4)  # the newest one of the context is 3
    monkeypatch.setattr(model.state_decoder, "forward", lambda state: state[:, :1, None, None].expand(-1, *CELL))
    empty, latents = torch.zeros(1, *CELL), torch.full((1, *CELL), 5.0)
    parts = torch.zeros(1, 6, 2), torch.ones(1, 3, dtype=torch.bool), empty, states[:, 0], empty[:, :2]
    loss, _ = state_decoder_loss(model, LatentBatch(empty[None], states, parts[0], latents, states, *parts))
    assert loss.item() == pytest.approx((5 - 3) ** 2)


def test_the_memory_holds_the_newest_frames_and_the_actions_between_them(
    model: LatentWorldModel, videos: VideoDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[torch.Tensor] = []
    draw = model.draw
    monkeypatch.setattr(
        model, "draw", lambda s, g, p, actions: (shown.append(actions[0, :, 0]), draw(s, g, p, actions))[1]
    )
    actions = torch.arange(1.0, 7.0)[None, :, None].expand(1, 6, 2)
    state, frames = model.step(begin(model, videos, [5]), actions)
    assert [row.tolist() for row in shown[:2]] == [[0, 0, 0, 1], [0, 0, 1, 2]] and shown[5].tolist() == [3, 4, 5, 6]
    assert state.memory["actions"][0, :, 0].tolist() == [4, 5, 6] and state.steps.tolist() == [6]
    assert torch.equal(state.memory["proprio"], frames.proprio[:, -CONTEXT:])
    assert state.memory["latents"].shape == (1, CONTEXT, *CELL)


def test_world_model_noise_differs_from_policy_noise(
    model: LatentWorldModel, videos: VideoDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[torch.Tensor] = []
    sample = model.sample
    monkeypatch.setattr(model, "sample", lambda noise, *given: (sampled.append(noise[1]), sample(noise, *given))[1])
    model.step(begin(model, videos, [5]), torch.zeros(1, 2, 2))
    for step, noise in enumerate(sampled):
        assert torch.equal(noise, PerRowGenerator([5], [step + (1 << 40)]).normal((1, *CELL))[0])
        assert not torch.equal(noise, PerRowGenerator([5], [step]).normal((1, *CELL))[0])


def test_constant_dimensions_keep_their_units(model: LatentWorldModel) -> None:
    model.fit_vectors(action=torch.tensor([[1.0, 7.0], [3.0, 7.0]]))
    assert model.action_mean.tolist() == [2.0, 7.0]
    assert model.action_std.tolist() == [pytest.approx(2**0.5), 1.0]
