"""`robopolicy VERB ...`: one module per verb, imported when it is used.

A verb module has `add_parser(subparsers)`, which must stay cheap (no torch), and `run(args) -> int`. Packages above
`robopolicy` add verbs of their own through the entry-point group `robopolicy.verbs`, each naming such a module.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import NoReturn

from robopolicy import __version__
from robopolicy.cli.options import check_alone
from robopolicy.cli.progress import listen_for_stop
from robopolicy.errors import UserError, did_you_mean, unknown_name
from robopolicy.sim.gl import check_choice

VERBS = (
    "collect",
    "data",
    "import",
    "train",
    "bench",
    "compose",
    "program",
    "eval",
    "worldmodel",
    "synthesize",
    "ope",
    "compress",
    "export",
    "elite",
    "serve",
    "verify",
    "play",
    "list",
    "doctor",
)
_NO_MUJOCO = ("data", "elite", "serve", "verify", "list", "doctor")  # the others import it, and it reads MUJOCO_GL

EXAMPLES = """\
examples:
  robopolicy list tasks
  robopolicy collect lift --episodes 200 --out data/lift
  robopolicy data data/lift
  robopolicy train experiment=lift_flow_bc dataset=data/lift
  robopolicy train experiment=lift_reinflow init_from=runs/lift_flow_bc/checkpoints/best
  robopolicy bench --seeds 5 experiment=half_cheetah_ppo
  robopolicy compose runs/lift_flow_bc/checkpoints/best runs/lift_diffusion_bc/checkpoints/best --out runs/lift_both
  robopolicy eval runs/lift_reinflow/checkpoints/best --episodes 200
  robopolicy serve runs/lift_reinflow/checkpoints/best
  robopolicy export runs/lift_reinflow/checkpoints/best --out bundles/lift
  robopolicy doctor
"""

_OUT_OF_MEMORY = ("allocate memory", "out of memory")  # how torch says it

_SIMULATORS = r"(gymnasium|envpool|metaworld|ogbench)\b"  # they warn of their own internals


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, and has room for every verb beside its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 2 + len("worldmodel") + 2  # argparse forgets that verbs are indented once more


class Parser(argparse.ArgumentParser):
    """An argument parser that keeps the line breaks of its examples and reports mistakes in one line."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", _Help)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage; `main` prints the line."""
        raise UserError(f"{message}; see '{self.prog} --help'.")


@cache
def added_verbs() -> dict[str, EntryPoint]:
    """Verbs of other packages by name, without importing them."""
    return {point.name: point for point in entry_points(group="robopolicy.verbs")}


def build_parser(verbs: Sequence[str]) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser with the given verbs, and each verb's own parser."""
    parser = Parser(
        prog="robopolicy",
        description="Robot policies from demonstrations to hardware: imitate, fine-tune with RL, evaluate, export. "
        "What lies in the place of --out stays: such a place is refused unless --overwrite is passed.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"robopolicy {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verbs:
        verb_module(verb).add_parser(subparsers)
    return parser, dict(subparsers.choices)


def verb_module(verb: str) -> ModuleType:
    """Import the module of a verb."""
    return importlib.import_module(f"robopolicy.cli.{verb}") if verb in VERBS else added_verbs()[verb].load()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        UserError: A verb or an option is unknown, or a value does not fit.
    """
    verb = argv[0] if argv and not argv[0].startswith("-") else None
    if verb is not None and verb not in VERBS and verb not in added_verbs():
        raise unknown_name("verb", verb, (*VERBS, *added_verbs()))
    parser, subparsers = build_parser((*VERBS, *added_verbs()) if verb is None else (verb,))
    args, unknown = parser.parse_known_args(argv)
    if unknown and not any(word.startswith("-") for word in unknown) and _plain(subparsers[args.verb]):
        # what argparse leaves over: arguments behind an option, when there were some in front of it
        args, unknown = subparsers[args.verb].parse_known_intermixed_args(argv[1:], argparse.Namespace(verb=args.verb))
    args.given = frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))  # see cli/given.py
    if unknown:
        options = {option for option in subparsers[args.verb]._option_string_actions if option.startswith("--")}
        hint = did_you_mean(unknown[0].split("=")[0], options - {"--help"})
        raise UserError(f"Unknown argument '{unknown[0]}'.{hint} See 'robopolicy {args.verb} --help'.")
    return args


def _plain(parser: argparse.ArgumentParser) -> bool:
    """Whether it has no actions with parsers of their own, among whose arguments options cannot be mixed."""
    return not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    warnings.filterwarnings("ignore", category=UserWarning, module=_SIMULATORS)
    if argv is None:  # as a program
        listen_for_stop()
        warnings.formatwarning = _warning
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.verb != "train":
            check_alone(args.verb)
        if args.verb not in _NO_MUJOCO:
            check_choice()
        return int(verb_module(args.verb).run(args))
    except UserError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # The reader (head, less) has gone; give Python a live descriptor to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _refuse(f"{error.filename or 'The system'}: {error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        return _refuse("The memory does not suffice; use fewer environments, smaller networks or smaller batches.")
    except KeyboardInterrupt:
        print("robopolicy: interrupted", file=sys.stderr)
        return 130


def _warning(message: Warning | str, *_: object) -> str:
    """One line, without the place in the source that Python would show."""
    return f"robopolicy: warning: {' '.join(str(message).split())}\n"


def _refuse(message: str) -> int:
    print(f"robopolicy: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
