"""Small videos of the toy push task for the tests of world models."""

from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.evaluation.actors import RandomExpert
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy_tasks.toy.push import DT, PushExpert

ACTIONS = ("gripper_vx [m/s]", "gripper_vy [m/s]")


def push_films(episodes: int = 8, *, size: int = 32, seed: int = 0, failures: bool = True) -> Episodes:
    """Episodes with images of the expert, with and without noise, and of random actions; without `failures` only
    successes of the expert."""
    found: list[Episode] = []

    class Sink:
        def add(self, episode: Episode) -> None:
            found.append(episode)

    rows = [("expert", PushExpert(), 0.0)]
    if failures:
        rows += [
            ("expert+0.6", PushExpert(), 0.6),
            ("random", RandomExpert(), 0.0),
            ("random+0.5", RandomExpert(), 0.5),
        ]
    with_images = SimOptions(num_envs=4, cameras=("top",), image_size=size)
    for index, (name, expert, noise) in enumerate(rows):
        count = episodes // len(rows)
        sim, first = make_sim("toy/push", with_images), seed + index * count
        options = {"seed": first, "noise": noise, "behaviour": name, "only_success": not failures}
        collect(sim, expert, Sink(), episodes=count, **options)
    return Episodes.from_list(found, DT, {"action": ACTIONS})
