"""Tests of the latent world model: closed forms of its denoiser, independent rows, seeds, chunks and uncertainty."""

from dataclasses import replace

import pytest
import torch
from small_world import CONFIG, small_films, small_world

from robopolicy.errors import UserError
from robopolicy.policies.noise import assign_slots
from robopolicy.worldmodel.contract import WorldState, first_frames
from robopolicy.worldmodel.latent import PRESETS, LatentWorldModel, LatentWorldModelConfig, to_float, to_uint8
from robopolicy.worldmodel.networks import StateDecoder
from robopolicy.worldmodel.videos import VideoDataset


@pytest.fixture(scope="module")
def videos() -> VideoDataset:
    return small_films()


@pytest.fixture(scope="module")
def model(videos) -> LatentWorldModel:
    """Returns an untrained model with random output layers."""
    world = small_world(videos)
    for parameter in (world.denoiser.out.weight, *world.state.body[-1].parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    return world


def begin(model: LatentWorldModel, videos: VideoDataset, rows: list[int], seeds: list[int]) -> WorldState:
    """Returns a world state that starts at the frames `rows`."""
    images, proprio = first_frames(videos.spec, {"top": videos.images["top"][rows]}, videos.proprio[rows])
    return model.reset(images, proprio, seeds=torch.tensor(seeds))


def test_the_denoiser_is_the_identity_without_noise(model):
    change, context = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 4, 2, 2)
    zeros = torch.zeros(3, 4, 4), torch.zeros(3, 4, 2), torch.zeros(3, 4), torch.zeros(3, 4, 2, 2)
    clean = model.denoiser(change, torch.full((3,), 1e-4), context, *zeros)
    assert torch.allclose(clean, change, atol=1e-3)


def test_new_denoiser_is_exact_for_unit_gaussian_data(videos):
    noisy, sigma = torch.randn(3, 4, 2, 2), torch.tensor([0.2, 1.0, 5.0])
    zeros = torch.zeros(3, 4, 4, 2, 2), torch.zeros(3, 4, 4), torch.zeros(3, 4, 2)
    world = small_world(videos)
    clean = world.denoiser(noisy, sigma, *zeros, torch.zeros(3, 4), torch.zeros(3, 4, 2, 2))
    assert torch.allclose(clean, noisy / (1 + sigma**2)[:, None, None, None])
    assert bool((world.state_change(world.state.look(zeros[0][:, -1]), *zeros[1:]) == 0).all())


@pytest.mark.filterwarnings("error")
def test_nothing_is_expected_of_a_frame_without_a_state_vector(videos):
    world = LatentWorldModel(CONFIG, replace(videos.spec, proprio_dim=0, proprio=(), proprio_names=()))
    change = world.expected_change(torch.ones(2, 4, 4, 2, 2), torch.zeros(2, 4, 0), torch.zeros(2, 0))
    assert change.shape == (2, 4, 2, 2) and not change.any()


def test_the_state_decoder_resolves_places():
    """A bright cell moves over 16 cells with one number, while the other numbers of the state change at random."""
    torch.manual_seed(0)
    decoder = StateDecoder(channels=1, grid=4, proprio_dim=4, width=64)
    optimizer = torch.optim.Adam(decoder.parameters(), 3e-3)

    def error() -> torch.Tensor:
        state = torch.rand(256, 4) * 3 - 1.5
        distance = (state[:, :1] + 1.5) / 3 * 16 - 0.5 - torch.arange(16)
        return (decoder(state).flatten(1) - torch.exp(-(distance**2))).pow(2).mean()

    for _ in range(300):
        optimizer.zero_grad()
        error().backward()
        optimizer.step()
    assert error() < 0.002  # 0.067 for an empty picture


def test_images_round_trip_through_floats():
    picture = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(to_uint8(to_float(picture)), picture)


def test_imagined_video_does_not_depend_on_the_other_batch_rows(model, videos):
    actions = torch.randn(6, 5, 2)
    alone = model.step(begin(model, videos, [40], [13]), actions[2:3])[1]
    order = [0, 7, 40, 80, 3, 2]
    among = model.step(begin(model, videos, order, [3, 9, 13, 5, 17, 1]), actions)[1]
    assert torch.equal(among.images["top"][2:3], alone.images["top"])
    assert torch.equal(among.proprio[2:3], alone.proprio)


def test_frames_depend_on_the_seed_and_not_on_chunking(model, videos):
    actions = torch.randn(2, 6, 2)
    first = model.step(begin(model, videos, [0, 0], [1, 2]), actions)[1].images["top"]
    assert not torch.equal(first[0], first[1])
    state, parts = begin(model, videos, [0, 0], [1, 2]), []
    for chunk in actions.split(2, 1):
        state, shown = model.step(state, chunk)
        parts.append(shown.images["top"])
    assert torch.equal(torch.cat(parts, 1), first)
    assert state.steps.tolist() == [6, 6]


def test_an_old_state_can_be_continued_again(model, videos):
    state, actions = begin(model, videos, [5], [4]), torch.randn(1, 3, 2)
    first = model.step(state, actions)[1]
    model.step(state, -actions)
    assert torch.equal(model.step(state, actions)[1].images["top"], first.images["top"])


def test_samples_measure_uncertainty_without_changing_frames(model, videos):
    several = LatentWorldModel(replace(CONFIG, samples=3), videos.spec).eval()
    several.load_state_dict(model.state_dict())
    actions = torch.randn(2, 2, 2)
    single = model.step(begin(model, videos, [0, 9], [1, 2]), actions)[1]
    shown = several.step(begin(several, videos, [0, 9], [1, 2]), actions)[1]
    assert torch.equal(shown.images["top"], single.images["top"])
    assert bool((shown.uncertainty > 0).all()) and bool((single.uncertainty == 0).all())


def test_slots_follow_the_seeds_and_colliding_rows_use_separate_calls():
    calls = assign_slots([5, 1, 2], 4)
    assert [call.members for call in calls] == [[0, 0, 2, 0], [1, 1, 1, 1]]
    assert [call.places for call in calls] == [[1, 2], [1]]
    assert [call.seated for call in calls] == [[0, 2], [1]]


def test_judgements_are_probabilities(model, videos):
    judgement = model.judge(
        {"top": videos.images["top"][:6].unflatten(0, (2, 3))}, videos.proprio[:6].unflatten(0, (2, 3))
    )
    assert judgement.success.shape == judgement.progress.shape == (2,) and not judgement.uncertain.any()
    assert bool(((judgement.success > 0) & (judgement.success < 1)).all())


@pytest.mark.parametrize(("name", "millions"), [("smoke", 0.34), ("tiny", 2.5), ("small", 10.1), ("base", 32.6)])
def test_presets_have_their_stated_sizes(videos, name, millions):
    with torch.device("meta"):
        model = LatentWorldModel(PRESETS[name], replace(videos.spec, size=128 if name == "base" else 64))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)


def test_sizes_that_do_not_fit_are_refused(videos):
    with pytest.raises(UserError, match="multiple of 8 pixels, got 20"):
        LatentWorldModel(CONFIG, replace(videos.spec, size=20))
    with pytest.raises(UserError, match="sigmas must be a non-empty falling list"):
        LatentWorldModelConfig(sigmas=(1.0, 2.0))
    with pytest.raises(UserError, match="multiple of 8"):
        LatentWorldModelConfig(width=20)
