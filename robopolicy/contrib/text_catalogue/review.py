"""Two messages about a given sum: `7+8=14?` wants `y` or `n`, then `7+8=` the right answer.

The reward verifies the answer. Metrics are `verdict` (of the first message), `refined` (the reward of the second) and
`first` (whether the given sum was right).
"""

from __future__ import annotations

from robopolicy.contrib.text_catalogue.critique import VERDICTS, CritiqueProblem
from robopolicy.text.task import FORMAT, TextEpisode, TextTask, Turn


class ReviewEpisode(TextEpisode):
    """A verdict, and then an answer of one's own."""

    def __init__(self, claimed: CritiqueProblem) -> None:
        self.claimed, self._verdict_given = claimed, False
        self.prompt = claimed.question

    def step(self, completion: str) -> Turn:
        """Receive the verdict, then the answer."""
        response, claimed = completion.strip(), self.claimed
        if not self._verdict_given:
            self._verdict_given = True
            grades = {FORMAT: response in VERDICTS, "verdict": response == claimed.verdict, "first": claimed.right}
            metrics = {name: float(grade) for name, grade in grades.items()}
            return Turn(0.0, done=False, reply=claimed.sum, metrics=metrics)
        right = response == claimed.answer
        return Turn(
            float(right), success=right, metrics={FORMAT: float(response.strip().isdigit()), "refined": float(right)}
        )

    def demonstration(self) -> list[str]:
        """The remaining messages of the demonstration."""
        return [self.claimed.answer] if self._verdict_given else [self.claimed.verdict, self.claimed.answer]


class Review(TextTask):
    """Verdict and answer; half of the sums to judge are wrong, mostly by little."""

    name = "text/review"
    prompt_bytes, completion_bytes, max_turns = 32, 6, 2

    def episode(self, seed: int) -> ReviewEpisode:
        """Another's sum of two digits."""
        return ReviewEpisode(CritiqueProblem.draw(seed))
