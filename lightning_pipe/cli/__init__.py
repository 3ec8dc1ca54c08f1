"""The command ``lightning-pipe``.

Each command is a function in the module of its name: its parameters are the options, its docstring
is the help. Only the module of the command that was asked for is imported.

Exit codes: 0; 1 for a "no" (it does not fit, it is not the same); 2 for wrong usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pipe import __version__
from lightning_pipe.cli.options import as_one_line, new_parser, parser_of, spelled_out

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "show": "Draw a schedule, and say how much of it is bubble.",
        "plan": "Choose depth, cuts, schedule and micro-batches from a profile.",
        "profile": "Measure time and memory of each layer of a module.",
        "check": "Tell before launch whether module, batch, schedule and memory go together.",
    }
)
"""What each command does: the first line of its docstring."""

_EXAMPLES = """\
lightning-pipe show zero_bubble --ranks 4 --microbatches 8
lightning-pipe show --help

The first option of a command may be given without its name."""

_INTERRUPTED, _PIPE_CLOSED = 130, 141  # what a shell reports for SIGINT and SIGPIPE


def main(args: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        args: Its name and options. Default: those of the process.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if args is None else args)
    name = next((arg for arg in args if not arg.startswith("-")), "")
    title = f"lightning-pipe {name}" if name in COMMANDS else "lightning-pipe"
    try:
        code = _run(name, args)
        sys.stdout.flush()  # a closed pipe shows here, not when Python exits
        return code
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError):  # rich has turned it into this
            return _PIPE_CLOSED
        return stopped.code if isinstance(stopped.code, int) else 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more
        return _PIPE_CLOSED
    except ArgumentError as error:
        print(f"{title}: error: {as_one_line(error)}. See {title} --help", file=sys.stderr)
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        print(f"{title}: error: {error}", file=sys.stderr)
    return 2


def _run(name: str, args: list[str]) -> int:
    """Parse the options, and call the command."""
    parser = new_parser("lightning-pipe", "Plan, draw and check pipelines.", _EXAMPLES)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subcommands(metavar="COMMAND", title="commands", description=" ")
    function: Callable[..., int | None] | None = None
    for other, summary in COMMANDS.items():
        prog = f"lightning-pipe {other}"
        if other == name:
            function = getattr(import_module(f"{__name__}.{name}"), name)
            args = spelled_out(args, after=args.index(name) + 1, function=function)
            commands.add_subcommand(other, parser_of(function, prog), help=summary)
        else:
            commands.add_subcommand(other, new_parser(prog), help=summary)
    options = parser.parse_args(args)
    assert function is not None, "the parser refuses other names"
    return function(**options[name].as_dict()) or 0


def _is_for_the_user(error: Exception) -> bool:
    """Tell a message of ours, or a file that is not there, from an error that nobody foresaw.

    A ValueError that another library or the user's module raises keeps its traceback.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = traceback.tb_frame.f_globals.get("__name__", "") if traceback is not None else ""
    ours = raised_in.partition(".")[0] == __name__.partition(".")[0]
    return ours and isinstance(error, MisconfigurationException | ValueError | ImportError)
