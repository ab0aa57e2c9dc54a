"""Two messages about a proposed sum: the verdict `y` or `n` for `7+8=14?`, then the answer to `7+8=`.

The reward verifies the answer. Metrics are `verdict` (of the first message), `refined` (the reward of the second) and
`first` (whether the proposed sum is correct).
"""

from __future__ import annotations

from robopolicy.contrib.text_catalogue.critique import VERDICTS, CritiqueProblem
from robopolicy.text.task import FORMAT, TextEpisode, TextTask, Turn


class ReviewEpisode(TextEpisode):
    """Episode of a verdict and an answer."""

    def __init__(self, problem: CritiqueProblem) -> None:
        self.problem, self._verdict_given = problem, False
        self.prompt = problem.question

    def step(self, completion: str) -> Turn:
        """Receive the verdict, then the answer."""
        response, problem = completion.strip(), self.problem
        if not self._verdict_given:
            self._verdict_given = True
            grades = {FORMAT: response in VERDICTS, "verdict": response == problem.verdict, "first": problem.right}
            metrics = {name: float(grade) for name, grade in grades.items()}
            return Turn(0.0, done=False, reply=problem.sum, metrics=metrics)
        right = response == problem.answer
        return Turn(
            float(right), success=right, metrics={FORMAT: float(response.strip().isdigit()), "refined": float(right)}
        )

    def demonstration(self) -> list[str]:
        """Return the remaining messages of the demonstration."""
        return [self.problem.answer] if self._verdict_given else [self.problem.verdict, self.problem.answer]


class Review(TextTask):
    """Verdict and answer; half of the proposed sums are wrong, mostly by small errors."""

    name = "text/review"
    prompt_bytes, completion_bytes, max_turns = 32, 6, 2

    def episode(self, seed: int) -> ReviewEpisode:
        """Return a proposed sum of two digits."""
        return ReviewEpisode(CritiqueProblem.draw(seed))
