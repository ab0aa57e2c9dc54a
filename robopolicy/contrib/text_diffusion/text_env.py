"""Text environment of masked-diffusion policies, with the capability to fill gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from robopolicy.contrib.text_diffusion.policy import DiffusionTextPolicy
from robopolicy.text.conversation import Conversation
from robopolicy.text.generation import Generation
from robopolicy.text.rollouts.protocols import Task, Trajectory
from robopolicy.text.text_env import TextEnv, score

PIECES = 4  # number of pieces of a message


class DiffusionTextEnv(TextEnv):
    """Text environment with masked diffusion; completions around given pieces belong to the plain task."""

    policy: DiffusionTextPolicy

    def inpaint(self, task: Task, share: float) -> Task | None:
        """Fix random pieces of the solution's first message; None without a solution."""
        solution = self.solution(task)
        if solution is None:
            return None
        tokens = self.policy.encode_message(solution[0])
        length = min(len(self.policy.tokenizer.encode(solution[0])) + 1, len(tokens))  # with the first `eos`
        pieces = torch.arange(length).tensor_split(min(PIECES, length))
        count = max(1, round(share * len(pieces)))
        places = [pieces[i] for i in torch.randperm(len(pieces), generator=self.generator)[:count].tolist()]
        given = {int(place): tokens[int(place)] for place in torch.cat(places)}
        return replace(task, prefix=None, context={"kind": "inpaint", "text": "", "given": given})

    def _generate(self, conversations: Sequence[Conversation]) -> Generation:
        return self.policy.generate(
            [one.prompt + one.columns["tokens"] for one in conversations],
            self.generator,
            temperature=torch.tensor([one.task.temperature for one in conversations]),
            deterministic=self.deterministic,
            given=[_given(one.task) if not one.responses else {} for one in conversations],
        )

    def trajectories_of(self, conversations: Sequence[Conversation]) -> list[Trajectory]:
        """Convert conversations like the base class, with given tokens marked in `extra["injected"]`."""
        return [self._with_injected(trajectory) for trajectory in super().trajectories_of(conversations)]

    @torch.no_grad()
    def _with_injected(self, trajectory: Trajectory) -> Trajectory:
        """Mark given tokens in `extra["injected"]`, and assign them a random generation order."""
        old = trajectory.decisions
        order, first = old.extra["order"].clone(), old.valid() & (old.require("unit") == 0)
        injected = old.valid() & (order == 0)
        extra = {**old.extra, "injected": injected}
        if not injected.any():
            return replace(trajectory, decisions=old.with_fields(extra=extra))
        order[first] = torch.tensor(self.policy.generation_order(int(first.sum()), self.generator))
        decisions = old.with_fields(extra={**extra, "order": order})
        if self.policy.config.likelihood == "chain":
            out = score(self.policy, decisions)
            logp, entropy = out.logp.cpu(), out.entropy.cpu()
            behaviour = torch.where(injected, logp, old.logp_old)
            decisions = decisions.with_fields(logp_old=logp, logp_behaviour=behaviour, entropy=entropy)
        return replace(trajectory, decisions=decisions)


def _given(task: Task) -> dict[int, int]:
    return task.context.get("given", {}) if isinstance(task.context, dict) else {}
