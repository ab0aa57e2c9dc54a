"""`worldmodel play --browser`: a world model in a browser, driven by keys or by a policy."""

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
from robopolicy.evaluation.harness import play
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.sim.contract import Observation, Step, VectorSim

UP, DOWN = "dwrty", "asfgh"  # keys that play the upper and the lower bound of each action dimension


REST, QUIT = " ", "q"


def action_of(key: str, sim: VectorSim) -> Tensor | None:
    """The action `(1, A)` of a key: zero at space, None for a key without one."""
    action = torch.zeros(1, sim.spec.action_dim).clamp(sim.spec.action_low, sim.spec.action_high)
    for keys, bound in ((UP, sim.spec.action_high), (DOWN, sim.spec.action_low)):
        dimension = keys.find(key)
        if 0 <= dimension < sim.spec.action_dim:
            action[0, dimension] = bound[dimension]
            return action
    return action if key == REST else None


def action_names(sim: VectorSim) -> tuple[str, ...]:
    """Those of the simulator, or numbers."""
    return sim.spec.action_names or tuple(f"action {index}" for index in range(sim.spec.action_dim))


def keys_help(sim: VectorSim) -> str:
    """Which key does what."""
    pairs = [f"{low}/{high} {name}" for low, high, name in zip(DOWN, UP, action_names(sim), strict=False)]
    return f"{', '.join(pairs)}, space rests, {QUIT} quits"


def pressed(script: str | None) -> Iterator[str]:
    """Keys of a script, or those that are pressed in the terminal, until `q`."""
    if script is not None:
        yield from script
        return
    with _raw_terminal():
        while (key := sys.stdin.read(1)) not in (QUIT, ""):
            yield key


def half_blocks(picture: Tensor) -> str:
    """A picture `(3, h, w)` uint8 as lines of coloured half blocks, upper and lower pixel in one character."""
    lines: list[str] = []
    for upper, lower in zip(picture[:, ::2].unbind(1), picture[:, 1::2].unbind(1), strict=False):
        pairs = zip(upper.T.tolist(), lower.T.tolist(), strict=True)
        cells = [f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m▀" for (a, b, c), (d, e, f) in pairs]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Read keys without waiting for a line, where there is a terminal."""
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
RETRY_DELAY, END = "again", "end"  # what the page says beside the keys
IDLE = 0.02  # [s] between looks at what was said


@dataclass
class View:
    """What is shown, and who listens."""

    page: Dashboard
    title: str
    words: Sequence[tuple[str, str]]  # what may be said, and what it means

    def show(self, side: str, seen: Observation) -> None:
        """Send the first environment's pictures, called after `side` and the camera."""
        for key, view in seen.items():
            if key.startswith(IMAGE_PREFIX):
                picture = view[0].permute(1, 2, 0).contiguous().numpy()
                self.page.send(pixels_packet(f"{side} {key.removeprefix(IMAGE_PREFIX)}", picture))

    def tell(self, *figures: tuple[str, str]) -> None:
        """Send figures by name."""
        self.page.send(json.dumps({"title": self.title, "words": self.words, "figures": figures}).encode())

    def said(self) -> Iterator[str]:
        """Words as they come, `CLIENT_CONNECTED` among them, until the end is asked for or the page has gone."""
        while (word := self.page.poll()) not in (b"", END.encode()):
            if word is None:
                time.sleep(IDLE)
            elif word != NO_CLIENTS:
                yield word.decode()


def by_keys(address: str, predicted: VectorSim, real: VectorSim, seed: int) -> None:
    """Play both by the same keys, until the end is asked for; `again` starts the next episode."""
    names = action_names(predicted)
    moves = [
        (key, f"{key}: {name} {way}")
        for keys, way in ((DOWN, "-"), (UP, "+"))
        for key, name in zip(keys, names, strict=False)
    ]
    words = [*moves, ("rest", "space: rest"), (RETRY_DELAY, "another episode"), (END, "end")]
    with closing(Dashboard(address, PAGE, [word for word, _ in words])) as page:
        view = View(page, predicted.spec.task, words)
        print(f"play at {page.url}", flush=True)
        sides = {"predicted": predicted, "real": real}
        over = True
        for word in view.said():
            if word in (RETRY_DELAY, CLIENT_CONNECTED.decode()):
                seed += word == RETRY_DELAY
                over = _begin(view, sides, seed)
            elif not over:
                over = _played(view, sides, word)


def by_policy(address: str, predicted: VectorSim, policy_entry: PolicyEntry, seeds: Sequence[int]) -> None:
    """Let a policy play the episodes `seeds` at its rate while somebody looks."""
    with ExitStack() as stack:
        page = stack.enter_context(closing(Dashboard(address, PAGE, [RETRY_DELAY, END])))
        view = View(page, f"{policy_entry.label} in {predicted.spec.task}", [(RETRY_DELAY, "once more"), (END, "end")])
        print(f"watch at {page.url}", flush=True)

        def show(moving: Tensor, step: Step) -> None:
            view.show("predicted", step.final_obs)
            view.tell(*_figures(step), ("seed", str(int(predicted.episode_seed[0]))))
            time.sleep(predicted.spec.control_dt)

        for _ in view.said():  # somebody looks, or wants to see it once more
            play(policy_entry.make(), predicted, seeds, on_step=show)


def _begin(view: View, sides: dict[str, VectorSim], seed: int) -> bool:
    for side, sim in sides.items():
        view.show(side, sim.reset([seed]))
    view.tell(("seed", str(seed)))
    return False


def _played(view: View, sides: dict[str, VectorSim], word: str) -> bool:
    """Play one key on both sides; whether an episode is over on one of them."""
    figures: list[tuple[str, str]] = []
    over = False
    for side, sim in sides.items():
        action = action_of(REST if word == "rest" else word, sim)
        assert action is not None  # the page knows no other keys
        step = sim.step(action)
        view.show(side, step.final_obs)
        figures += [(f"{side}: {name}", value) for name, value in _figures(step)]
        over |= bool(step.done[0])
    view.tell(*figures, *([("over", "press 'another episode'")] if over else []))
    return over


def _figures(step: Step) -> list[tuple[str, str]]:
    """What is known of the first environment."""
    shown = [("success", "yes" if bool(step.info["success"][0]) else "no")] if "success" in step.info else []
    return shown + [
        (name, f"{float(step.info[name][0]):.2f}") for name in ("progress", "uncertainty") if name in step.info
    ]
