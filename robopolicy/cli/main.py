"""Entry point `robopolicy COMMAND ...`; imports only the module of the command."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import NoReturn

from robopolicy import __version__
from robopolicy.cli.commands import COMMANDS, command_names
from robopolicy.cli.options import add_code_options, check_single_process
from robopolicy.cli.progress import handle_stop_signals
from robopolicy.errors import UserError, did_you_mean, unknown_name
from robopolicy.permissions import code_permissions
from robopolicy.sim.gl import check_mujoco_gl

EXAMPLES = """\
examples:
  robopolicy list tasks
  robopolicy collect lift --episodes 200 --out data/lift
  robopolicy data card data/lift
  robopolicy train experiment=few_demonstrations task=lift dataset=data/lift name=lift_flow_bc
  robopolicy train experiment=fine_tune init_from=runs/lift_flow_bc/checkpoints/best name=lift_reinflow
  robopolicy bench --seeds 5 experiment=from_scratch task=half_cheetah
  robopolicy compose runs/lift_flow_bc/checkpoints/best runs/lift_diffusion_bc/checkpoints/best --out runs/lift_both
  robopolicy eval runs/lift_reinflow/checkpoints/best --episodes 200
  robopolicy serve runs/lift_reinflow/checkpoints/best
  robopolicy export runs/lift_reinflow/checkpoints/best --out bundles/lift
  robopolicy doctor
"""

MAX_ERROR = 300  # characters of an error message
_OUT_OF_MEMORY = ("allocate memory", "out of memory")  # in messages of torch
_SIMULATORS = r"(gymnasium|envpool|metaworld|ogbench)\b"  # warnings about their own internals are ignored


class _Help(argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps line breaks and aligns the help of all commands."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 2 + len("worldmodel") + 2  # argparse ignores the additional indent of commands


class Parser(argparse.ArgumentParser):
    """Argument parser that keeps the line breaks of its examples and reports errors in one line."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", _Help)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise a UserError instead of printing the usage."""
        raise UserError(f"{message}; see '{self.prog} --help'.")


def build_parser(names: Iterable[str], chosen: str | None) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """Build the parser of the commands `names`, and return it with the parsers of the commands.

    Only the module of the command `chosen` is imported, so only its arguments are known.
    """
    parser = Parser(
        prog="robopolicy",
        description="Robot policies from demonstrations to hardware: imitate, fine-tune with RL, evaluate, export. "
        "Existing output is kept unless you pass --overwrite.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"robopolicy {__version__}")
    subparsers = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    for name in names:
        if name == chosen:
            COMMANDS[name].load().add_parser(subparsers)
            if COMMANDS[name].loads_policies:
                add_code_options(subparsers.choices[name])
        else:
            subparsers.add_parser(name, help=COMMANDS[name].help)
    return parser, dict(subparsers.choices)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; unknown commands and options and invalid values raise a UserError."""
    chosen = argv[0] if argv and not argv[0].startswith("-") else None
    if chosen is not None and chosen not in COMMANDS:
        raise unknown_name("command", chosen, COMMANDS)
    parser, subparsers = build_parser(command_names() if chosen is None else (chosen,), chosen)
    args, unknown = parser.parse_known_args(argv)
    command = subparsers[args.command_name]
    if unknown and not any(word.startswith("-") for word in unknown) and not _has_subcommands(command):
        # argparse does not parse arguments after an option if others precede it
        namespace = argparse.Namespace(command_name=args.command_name)
        args, unknown = command.parse_known_intermixed_args(argv[1:], namespace)
    args.given = frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))  # see `reject_unused`
    if unknown:
        options = {option for option in command._option_string_actions if option.startswith("--")}
        hint = did_you_mean(unknown[0].split("=")[0], options - {"--help"})
        raise UserError(f"Unknown argument '{unknown[0]}'.{hint} See 'robopolicy {args.command_name} --help'.")
    return args


def _has_subcommands(parser: argparse.ArgumentParser) -> bool:
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 success, 2 invalid input, 130 interrupted."""
    warnings.filterwarnings("ignore", category=UserWarning, module=_SIMULATORS)
    if argv is None:  # as a program
        if "_ARGCOMPLETE" in os.environ:  # called by the shell for completion
            complete()
        handle_stop_signals()
        warnings.formatwarning = _warning
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.command_name != "train" and (args.command_name, getattr(args, "action", "")) != ("worldmodel", "train"):
            check_single_process(args.command_name)
        command = COMMANDS[args.command_name]
        if getattr(args, "device", "") == "auto" and not command.imports_torch_late:
            from robopolicy.device import device_name

            args.device = device_name(args.device)
        if command.needs_mujoco:
            check_mujoco_gl()
        if not command.loads_policies:
            return int(command.load().run(args))
        with code_permissions(allow=args.allow_code, unsafe=args.unsafe_code):
            return int(command.load().run(args))
    except UserError as error:
        return _print_error(str(error))
    except UnicodeEncodeError as error:
        found = ascii(error.object[error.start : error.end])
        return _print_error(f"An argument or a path contains {found}, which is not UTF-8; choose another name.")
    except ValueError as error:
        if "embedded null" not in str(error):  # of a system call with a path
            raise
        return _print_error("An argument or a path contains a NUL character; choose another name.")
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; give Python a valid descriptor to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _print_error(f"{error.filename or 'The system'}: {error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        return _print_error("Out of memory; use fewer environments, smaller networks or smaller batches.")
    except KeyboardInterrupt:
        print("robopolicy: interrupted", file=sys.stderr)
        return 130


def complete() -> None:
    """Write the completions for the script of `robopolicy completion`, and exit."""
    import argcomplete

    from robopolicy.cli.completion import add_completers

    words = os.environ.get("COMP_LINE", "").split()
    chosen = words[1] if len(words) > 1 and words[1] in COMMANDS else None
    parser, subparsers = build_parser(command_names(), chosen)
    if chosen is not None:
        add_completers(subparsers[chosen])
    argcomplete.autocomplete(parser)


def _warning(message: Warning | str, *_: object) -> str:
    """Format a warning as one line, without its location in the source."""
    return f"robopolicy: warning: {' '.join(str(message).split())}\n"


def _print_error(message: str) -> int:
    line = f"robopolicy: error: {' '.join(message.split())}"
    line = "".join(letter if letter.isprintable() else "?" for letter in line)  # foreign names may control terminals
    if len(line) > MAX_ERROR:  # the start says what is wrong, the end what to do
        line = f"{line[: MAX_ERROR - 175]} ... {line[-170:]}"
    print(line, file=sys.stderr)
    return 2
