"""World models in the terminal or a browser, controlled by keys or by a policy (`worldmodel play`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from robopolicy.cli.policy_args import PolicyEntry
from robopolicy.deploy.dashboard import CLIENT_CONNECTED, NO_CLIENTS, Dashboard, pixels_packet
from robopolicy.evaluation.harness import run_episodes
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.sim.contract import Observation, Step, VectorSim

UP, DOWN = "dwrty", "asfgh"  # keys of the upper and the lower bound of each action dimension
REST, QUIT = " ", "q"


def action_of(key: str, sim: VectorSim) -> Tensor | None:
    """Return the action `(1, A)` of a key: zero for space, None for an unassigned key."""
    action = torch.zeros(1, sim.spec.action_dim).clamp(sim.spec.action_low, sim.spec.action_high)
    for keys, bound in ((UP, sim.spec.action_high), (DOWN, sim.spec.action_low)):
        dimension = keys.find(key)
        if 0 <= dimension < sim.spec.action_dim:
            action[0, dimension] = bound[dimension]
            return action
    return action if key == REST else None


def action_names(sim: VectorSim) -> tuple[str, ...]:
    """Return the action names of the simulator, or numbered names."""
    return sim.spec.action_names or tuple(f"action {index}" for index in range(sim.spec.action_dim))


def keys_help(sim: VectorSim) -> str:
    """Describe the keys in one line."""
    pairs = [f"{low}/{high} {name}" for low, high, name in zip(DOWN, UP, action_names(sim), strict=False)]
    return f"{', '.join(pairs)}, space rests, {QUIT} quits"


def pressed(script: str | None) -> Iterator[str]:
    """Yield the keys of a script, or from the terminal until `q`."""
    if script is not None:
        yield from script
        return
    with _raw_terminal():
        while (key := sys.stdin.read(1)) not in (QUIT, ""):
            yield key


def half_blocks(image: Tensor) -> str:
    """Render an image `(3, h, w)` uint8 as lines of coloured half blocks, two pixels per character."""
    lines: list[str] = []
    for upper, lower in zip(image[:, ::2].unbind(1), image[:, 1::2].unbind(1), strict=False):
        pairs = zip(upper.T.tolist(), lower.T.tolist(), strict=True)
        cells = [f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m▀" for (a, b, c), (d, e, f) in pairs]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Read single keys from a terminal without waiting for a line."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


PAGE = Path(__file__).parent / "world_page.html"
NEXT_EPISODE, END = "again", "end"  # commands of the page in addition to the keys
POLL_INTERVAL = 0.02  # [s] between polls of the page


@dataclass
class View:
    """View of an episode in the browser."""

    page: Dashboard
    title: str
    buttons: Sequence[tuple[str, str]]  # commands of the page and their labels

    def send_images(self, side: str, obs: Observation) -> None:
        """Send the images of the first environment, named after `side` and the camera."""
        for key, value in obs.items():
            if key.startswith(IMAGE_PREFIX):
                image = value[0].permute(1, 2, 0).contiguous().numpy()
                self.page.send(pixels_packet(f"{side} {key.removeprefix(IMAGE_PREFIX)}", image))

    def send_values(self, *values: tuple[str, str]) -> None:
        """Send named values."""
        self.page.send(json.dumps({"title": self.title, "words": self.buttons, "figures": values}).encode())

    def commands(self) -> Iterator[str]:
        """Yield the commands of the page, including `CLIENT_CONNECTED`, until the end command."""
        while (command := self.page.poll()) not in (b"", END.encode()):
            if command is None:
                time.sleep(POLL_INTERVAL)
            elif command != NO_CLIENTS:
                yield command.decode()


def teleoperate(address: str, predicted: VectorSim, real: VectorSim, seed: int) -> None:
    """Control both simulators by the same keys until the end command; `again` starts the next episode."""
    names = action_names(predicted)
    moves = [
        (key, f"{key}: {name} {way}")
        for keys, way in ((DOWN, "-"), (UP, "+"))
        for key, name in zip(keys, names, strict=False)
    ]
    buttons = [*moves, ("rest", "space: rest"), (NEXT_EPISODE, "another episode"), (END, "end")]
    with closing(Dashboard(address, PAGE, [command for command, _ in buttons])) as page:
        view = View(page, predicted.spec.task, buttons)
        print(f"play at {page.url}", flush=True)
        sides = {"predicted": predicted, "real": real}
        over = True
        for command in view.commands():
            if command in (NEXT_EPISODE, CLIENT_CONNECTED.decode()):
                seed += command == NEXT_EPISODE
                over = _reset(view, sides, seed)
            elif not over:
                over = _step(view, sides, command)


def run_policy(address: str, predicted: VectorSim, policy_entry: PolicyEntry, seeds: Sequence[int]) -> None:
    """Run a policy on the episodes `seeds` in real time while the page is watched."""
    with ExitStack() as stack:
        page = stack.enter_context(closing(Dashboard(address, PAGE, [NEXT_EPISODE, END])))
        view = View(page, f"{policy_entry.label} in {predicted.spec.task}", [(NEXT_EPISODE, "once more"), (END, "end")])
        print(f"watch at {page.url}", flush=True)

        def show(moving: Tensor, step: Step) -> None:
            view.send_images("predicted", step.final_obs)
            view.send_values(*_values(step), ("seed", str(int(predicted.episode_seed[0]))))
            time.sleep(predicted.spec.control_dt)

        for _ in view.commands():  # a new viewer, or a repetition
            run_episodes(policy_entry.make(), predicted, seeds, on_step=show)


def _reset(view: View, sides: dict[str, VectorSim], seed: int) -> bool:
    for side, sim in sides.items():
        view.send_images(side, sim.reset([seed]))
    view.send_values(("seed", str(seed)))
    return False


def _step(view: View, sides: dict[str, VectorSim], command: str) -> bool:
    """Step both simulators with one key; return whether an episode has ended."""
    values: list[tuple[str, str]] = []
    over = False
    for side, sim in sides.items():
        action = action_of(REST if command == "rest" else command, sim)
        assert action is not None  # the page sends no other keys
        step = sim.step(action)
        view.send_images(side, step.final_obs)
        values += [(f"{side}: {name}", value) for name, value in _values(step)]
        over |= bool(step.done[0])
    view.send_values(*values, *([("over", "press 'another episode'")] if over else []))
    return over


def _values(step: Step) -> list[tuple[str, str]]:
    """Format the values of the first environment."""
    info = step.info
    success = [("success", "yes" if bool(info["success"][0]) else "no")] if "success" in info else []
    return success + [(name, f"{float(info[name][0]):.2f}") for name in ("progress", "uncertainty") if name in info]
