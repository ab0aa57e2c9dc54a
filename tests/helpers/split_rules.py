"""Rules of the split of problems into training and held-out problems."""

from robopolicy.text.task import TextTask, is_held_out


def check_problems_are_disjoint(task: TextTask, seeds: int = 400) -> None:
    """Training and held-out problems of the same seeds share no content; the content decides."""
    sides = [{task.content(find(seed)) for seed in range(seeds)} for find in (task.training_seed, task.held_out_seed)]
    training, held_out = sides
    assert training and held_out and not training & held_out
    assert not any(map(is_held_out, training)) and all(map(is_held_out, held_out))
    prompts = [
        {task.episode(find(seed)).prompt for seed in range(seeds)} for find in (task.training_seed, task.held_out_seed)
    ]
    assert not prompts[0] & prompts[1]
