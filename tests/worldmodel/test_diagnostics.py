"""Tests of action following: world models with known answers, and models that must fail."""

import pytest
import torch
from films import ACTIONS, push_films
from small_world import small_films
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.worldmodel.action_following import (
    check_gates,
    failure_fraction,
    frame_psnr,
    measure_action_following,
    standardized_slopes,
    steadiest,
    table,
)
from robopolicy.worldmodel.contract import Frames, Images, WorldSpec, WorldState
from robopolicy.worldmodel.videos import VideoDataset, infer_spec
from robopolicy_tasks.toy.push import push, render_tables


class TrueWorld:
    """The pushing toy itself as a world model; `hearing` scales the actions it receives."""

    device = torch.device("cpu")

    def __init__(self, spec: WorldSpec, hearing: float = 1.0) -> None:
        self.spec, self.hearing = spec, hearing

    def reset(
        self, images: Images, proprio: Tensor, *, seeds: Tensor, actions: Tensor | None = None, text: str = ""
    ) -> WorldState:
        return WorldState(seeds, torch.zeros_like(seeds), {"state": proprio[:, -1]})

    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        places, pictures = [state.memory["state"]], []
        for action in actions.unbind(1):
            gripper, block = push(places[-1][:, :2], places[-1][:, 2:], self.hearing * action)
            places.append(torch.cat([gripper, block], 1))
            pictures.append(render_tables(gripper, block, self.spec.size, self.spec.size))
        after = WorldState(state.seeds, state.steps + actions.shape[1], {"state": places[-1]})
        return after, Frames(
            {"top": torch.stack(pictures, 1)}, torch.stack(places[1:], 1), torch.zeros(actions.shape[:2])
        )


@pytest.fixture(scope="module")
def videos() -> VideoDataset:
    return small_films(16)


def test_psnr_matches_its_definition():
    real = torch.zeros(1, 1, 3, 2, 2, dtype=torch.uint8)
    assert frame_psnr({"top": real + 255}, {"top": real}).item() == pytest.approx(0.0)
    assert frame_psnr({"top": real + 51}, {"top": real}).item() == pytest.approx(13.979, abs=1e-3)  # 20 log10(5)


def test_the_true_world_passes(videos):
    following = measure_action_following(TrueWorld(videos.spec), videos, horizon=5, windows=16)
    assert following.gap() > 10 and following.gap("zero") > 10
    assert following.directions == dict.fromkeys(ACTIONS, 1.0)
    assert check_gates(following, failures=failure_fraction(videos)).passed
    assert [row[0] for row in table(following)[1]] == ["true", "shuffled", "zero"]


def test_model_that_ignores_actions_is_refused(videos):
    following = measure_action_following(TrueWorld(videos.spec, hearing=0.0), videos, horizon=5, windows=16)
    assert following.gap() == following.gap("zero") == 0.0
    verdict = check_gates(following, failures=0.5)
    assert not verdict.passed
    with pytest.raises(
        UserError, match=r"MODEL must not evaluate policies: It ignores actions: shuffled actions cost 0\.00"
    ):
        verdict.require("MODEL")


def test_model_with_the_wrong_motion_direction_is_refused(videos):
    following = measure_action_following(TrueWorld(videos.spec, hearing=-1.0), videos, horizon=5, windows=16)
    assert following.directions == dict.fromkeys(ACTIONS, 0.0)
    reasons = check_gates(following, failures=0.5).reasons
    assert any("'gripper_vx [m/s]' has the wrong direction from 100% of the frames" in reason for reason in reasons)


def test_slopes_separate_the_effects_of_correlated_actions():
    generator = torch.Generator().manual_seed(0)
    lift = torch.randn(2000, generator=generator)
    close = 0.8 * lift + 0.6 * torch.randn(2000, generator=generator)  # lifting coincides with closing
    width = -0.4 * close + torch.randn(2000, generator=generator)  # the grasped object limits the width
    slopes = standardized_slopes(torch.stack([lift, close], 1), torch.stack([lift, width, torch.zeros(2000)], 1))
    assert slopes[0].abs().argmax() == 0 and slopes[1].abs().argmax() == 1 and slopes[1, 1] < -0.3
    assert slopes[1, 0].abs() < 1e-4 and not slopes[:, 2].any()


def test_an_effect_is_sought_where_it_never_ceases():
    up = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    above = -1.2 * up * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])  # the height above an object, held at the end
    slopes = standardized_slopes(up[:, None], torch.stack([above, up, torch.zeros(6)], 1))[0]
    assert slopes.abs()[:2].min() > 0.8 and steadiest(slopes, up, torch.stack([above, up, torch.zeros(6)], 1)) == 1
    faint = torch.tensor([-1.0, 0.5, 0.0])
    assert steadiest(faint, up, torch.stack([above, up, torch.zeros(6)], 1)) == 0  # not comparable


def test_model_trained_only_on_successes_is_refused(videos):
    wins = push_films(6, size=16, failures=False)
    share = failure_fraction(VideoDataset(infer_spec(wins), wins))
    assert share == 0.0
    verdict = check_gates(
        measure_action_following(TrueWorld(videos.spec), videos, horizon=5, windows=16), failures=share
    )
    assert not verdict.passed and "trained on successes: 0% of its episodes failed" in verdict.reasons[0]


def test_worlds_without_a_state_vector_are_evaluated_by_their_frames(videos):
    episodes = videos.episodes
    spec = infer_spec(episodes, proprio=())
    assert spec.proprio_dim == 0

    class Blind(TrueWorld):
        """Reads the state from the dataset instead of the proprioception."""

        def reset(self, images, proprio, *, seeds, actions=None, text=""):
            state = videos.proprio[videos.starts(5, 16)] if len(seeds) == 16 else torch.zeros(len(seeds), 4)
            return WorldState(seeds, torch.zeros_like(seeds), {"state": state})

    following = measure_action_following(Blind(spec), VideoDataset(spec, episodes), horizon=5, windows=16)
    assert following.directions == {}
