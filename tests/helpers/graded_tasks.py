"""Checks for text tasks with a graded format."""

from robopolicy.text.task import TextTask


def check_solutions_solve_and_fit(task: TextTask) -> None:
    """Demonstrations succeed with the required format, within the turns and bytes of the task."""
    for seed in range(200):
        episode = task.episode(seed)
        responses = episode.demonstration()
        turns = [episode.step(message) for message in responses]
        assert turns[-1].success and turns[-1].done and not any(turn.done for turn in turns[:-1])
        assert len(responses) <= task.max_turns and max(len(message) for message in responses) < task.completion_bytes
        conversation = sum(len(turn.reply) + len(message) + 1 for turn, message in zip(turns, responses, strict=True))
        assert len(episode.prompt) + conversation <= task.prompt_bytes + task.completion_bytes
        assert all(turn.metrics["format"] == 1.0 for turn in turns)
