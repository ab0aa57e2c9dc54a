"""Small films of the pushing toy for the tests of world models."""

from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.evaluation.actors import RandomExpert
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy_tasks.toy.push import DT, PushExpert

ACTIONS = ("gripper_vx [m/s]", "gripper_vy [m/s]")


def push_films(episodes: int = 8, *, size: int = 32, seed: int = 0, failures: bool = True) -> Episodes:
    """Films of the expert, undisturbed and disturbed, and of random actions; of the expert's successes alone without
    `failures`."""
    found: list[Episode] = []

    class Sink:
        def add(self, episode: Episode) -> None:
            found.append(episode)

    who = [("expert", PushExpert(), 0.0)]
    if failures:
        who += [("expert+0.6", PushExpert(), 0.6), ("random", RandomExpert(), 0.0), ("random+0.5", RandomExpert(), 0.5)]
    with_images = SimOptions(num_envs=4, cameras=("top",), image_size=size)
    for index, (name, expert, noise) in enumerate(who):
        count = episodes // len(who)
        sim, first = make_sim("toy/push", with_images), seed + index * count
        options = {"seed": first, "noise": noise, "behaviour": name, "only_success": not failures}
        collect(sim, expert, Sink(), episodes=count, **options)
    return Episodes.from_list(found, DT, {"action": ACTIONS})
