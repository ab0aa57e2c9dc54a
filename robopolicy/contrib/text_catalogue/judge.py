"""Language policies as reward models: the probability of approval, given the judge prompt of the task.

judge: policy       key of `rollout` in a recipe: the trained policy scores its own responses
judge: teacher      the teacher scores them
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.scoring_options import ScoringOption
from robopolicy.text.task import JudgePrompt, TextTask
from robopolicy.text.text_env import TextEnv, score, with_chosen_tokens


@dataclass(frozen=True)
class PolicyJudge:
    """Judge with the current weights of a policy."""

    policy: TextPolicy
    generator: torch.Generator  # for policies with estimated likelihoods

    @torch.no_grad()
    def __call__(self, requests: Sequence[JudgePrompt]) -> list[float]:
        """Compute the probability of the approving verdict, normalised over both verdicts."""
        if not requests:
            return []
        written = [[one.prompt, message] for one in requests for message in (one.approve, one.reject)]
        extra, _ = self.policy.conversations(written, self.generator)
        mask = extra.pop("mask")
        extra["temperature"] = torch.ones(len(mask), device=mask.device)
        blank = torch.zeros(mask.shape, device=mask.device)
        rows = with_chosen_tokens(Decisions(blank, mask=mask, reward=blank, extra=extra))
        rows = self.policy.attach_likelihood(rows, self.generator)
        logp = score(self.policy, rows).logp.masked_fill(~rows.valid(), 0.0).sum(1)
        if "masked" in rows.extra:  # samples of a bound instead of tokens
            logp = logp / rows.valid().sum(1)
        return logp.view(-1, 2).softmax(1)[:, 0].tolist()


@dataclass(frozen=True)
class JudgeOption(ScoringOption):
    """Judge that is the policy or the teacher."""

    judge: str  # policy | teacher

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse policy or teacher."""
        if value not in ("policy", "teacher"):
            raise ValueError(f"rollout.judge must be policy or teacher, got {value!r}.")
        return cls(value)

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """Requirements: the judge runs in this process."""
        return ("num_workers", "teacher") if self.judge == "teacher" else ("num_workers",)

    def configure_env(self, env: TextEnv, learner: TextRecipe) -> None:
        """Set the judge of the environment, which uses the generator of the environment."""
        if type(env.task).judge_prompt is TextTask.judge_prompt:
            raise UserError(
                f"Recipe '{learner.config.recipe}' has a judge, but task {env.task.name} has no judge "
                "prompt (`TextTask.judge_prompt`); choose another recipe or task."
            )
        judge = env.policy if self.judge == "policy" else learner.teacher
        assert judge is not None  # checked by `recipe_source`
        env.judge = PolicyJudge(judge, env.generator)
