"""Errors of predicted actions on recorded episodes, for policies without a simulator.

The policy decides at every `action_horizon`-th frame from the recorded observations, as in deployment, and every
recorded action is predicted once. Errors are absolute differences, averaged over the frames of an episode; the episode
is the unit of the intervals. A small error is necessary, not sufficient: a robot leaves the recorded states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.data.chunks import history_index
from robopolicy.data.compatibility import check_dataset_for_policy
from robopolicy.data.episodes import Array, Episodes
from robopolicy.evaluation.intervals import Interval, student_mean
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Policy
from robopolicy.policies.noise import row_generator
from robopolicy.policies.wrappers.relative_actions import RelativeActionPolicy
from robopolicy.spec import HIDDEN_STATE

ROWS = 64  # observations per call of the policy


@dataclass(frozen=True)
class ActionError:
    """Errors of the actions of a policy on E recorded episodes."""

    names: tuple[str, ...]  # (A,) with units in brackets, where the dataset has them
    errors: NDArray[np.float64]  # (E, A) mean absolute errors, in the units of the actions
    spread: NDArray[np.float64]  # (A,) standard deviations of recorded actions

    def relative(self) -> Interval:
        """Mean error in standard deviations of the recorded actions; constant entries keep their units."""
        return student_mean((self.errors / np.where(self.spread > 0, self.spread, 1.0)).mean(1))

    def by_entry(self) -> dict[str, Interval]:
        """Mean error of each entry of the actions, in its units."""
        return {name: student_mean(self.errors[:, index]) for index, name in enumerate(self.names)}

    def summary(self) -> dict[str, Any]:
        """Return numbers for logs and reports; bounds are None with a single episode."""
        total = self.relative().to_dict()
        return {
            "n": total["n"],
            "action_error": total["estimate"],
            "action_error_low": total["low"],
            "action_error_high": total["high"],
            "entries": {name: interval.to_dict() for name, interval in self.by_entry().items()},
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows: the error of every entry of the actions, and of all of them."""
        rows = [
            [name, f"{interval}", f"{spread:.3g}"]
            for (name, interval), spread in zip(self.by_entry().items(), self.spread, strict=True)
        ]
        return ["action", "mean absolute error", "spread"], [*rows, ["all, per spread", f"{self.relative()}", ""]]


@dataclass(frozen=True)
class HeldOut:
    """Episodes that a run does not train on."""

    episodes: Episodes
    spread: NDArray[np.float64]  # (A,) standard deviations of the actions of the whole dataset

    def error(self, policy: Policy) -> ActionError:
        """Compare the actions of `policy` with the recorded ones."""
        return action_error(policy, self.episodes, spread=self.spread)


def action_error(
    policy: Policy, episodes: Episodes, *, spread: NDArray[np.float64] | None = None, what: str = "the dataset"
) -> ActionError:
    """Compare the actions of `policy` without exploration noise with recorded ones.

    Args:
        policy: The policy.
        episodes: Recorded episodes.
        spread: Standard deviations `(A,)` of recorded actions; by default, of `episodes`.
        what: Name of the episodes in messages.

    Raises:
        UserError: The episodes lack observations of the policy, or their sizes differ.
    """
    spec, device = policy.spec, policy.device
    check_dataset_for_policy(episodes, spec, what)
    action = episodes.arrays["action"].astype(np.float64)
    predicted = np.zeros_like(action)
    history = history_index(episodes, spec.obs_horizon)
    keys = [key for key in spec.observation if key != HIDDEN_STATE]
    with evaluation_mode(policy), torch.inference_mode():
        for start in range(0, episodes.num_episodes, ROWS):
            rows = np.arange(start, min(start + ROWS, episodes.num_episodes))
            hidden = torch.zeros(len(rows), 1, spec.hidden_dim, device=device)
            for decision in range(math.ceil(episodes.lengths[rows].max() / spec.action_horizon)):
                frame = episodes.starts[rows] + decision * spec.action_horizon
                running = frame < episodes.ends[rows]
                rows, frame, hidden = rows[running], frame[running], hidden[torch.from_numpy(running)]
                obs = {key: _tensor(episodes.arrays[key][history[frame]]).to(device) for key in keys}
                obs |= {HIDDEN_STATE: hidden} if spec.hidden_dim else {}
                seeds = torch.from_numpy(rows).to(device)
                noise = row_generator(seeds, torch.full_like(seeds, decision))
                chunk = policy.act(obs, deterministic=True, generator=noise).cpu().numpy()
                hidden = policy.next_hidden(obs) if spec.hidden_dim else hidden
                for index, (first, end) in enumerate(zip(frame, episodes.ends[rows], strict=True)):
                    count = min(spec.action_horizon, end - first)
                    predicted[first : first + count] = chunk[index, :count]
    if isinstance(policy, RelativeActionPolicy):
        predicted = policy.representation.nearest(torch.from_numpy(predicted), torch.from_numpy(action)).numpy()
    errors = np.add.reduceat(np.abs(predicted - action), episodes.starts) / episodes.lengths[:, None]
    names = episodes.names.get("action", ()) or tuple(f"action {index}" for index in range(action.shape[1]))
    return ActionError(names, errors, action.std(0) if spread is None else spread)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
