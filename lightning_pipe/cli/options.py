"""From a function to the options of a command, as LightningCLI makes them, with three comforts.

A flag needs no value (``--json``), words may be joined by dashes (``--stages-per-rank``), and a
list of numbers needs no brackets (``--forward 1,2,1``).
"""

from __future__ import annotations

import inspect
import json
import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import docstring_parser
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser, DefaultHelpFormatter

_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_WORDS = "overrides"  # words key=value after the first
_NUMBERS = re.compile(r"[-+.e\d]+(,[-+.e\d]+)+")


class _Help(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the examples."""


def new_parser(prog: str, description: str = "", examples: str = "") -> ArgumentParser:
    """Make a parser that raises instead of ending the process.

    Args:
        prog: How its command is called.
        description: What the command does.
        examples: Shown below the options, line by line.
    """
    return ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"examples:\n{_indented(examples)}" if examples else "",
        formatter_class=_Help,
        exit_on_error=False,
    )


def parser_of(function: Callable[..., Any], prog: str) -> ArgumentParser:
    """Make options of a function's parameters, and help of its Google docstring.

    Parameters without a default are given by their place, all others by name; a parameter whose
    default is True or False is a flag.

    Args:
        function: With types and a docstring; its ``Examples`` are command lines.
        prog: How the command is called.
    """
    words = docstring_parser.parse(inspect.getdoc(function) or "")
    description = "\n\n".join(filter(None, (words.short_description, words.long_description)))
    examples = "\n".join(example.description or "" for example in words.examples)
    parser = new_parser(prog, description, examples)
    flags = _flags(function)
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip=set(flags))
    helps = {parameter.arg_name: parameter.description for parameter in words.params}
    for name, default in flags.items():
        action = ActionYesNo(no_prefix="no_")
        parser.add_argument(f"--{name}", action=action, default=default, help=helps.get(name))
    return parser


def spelled_out(args: Sequence[str], after: int, function: Callable[..., Any]) -> list[str]:
    """Give the arguments as the parser knows them.

    Args:
        args: As the user wrote them.
        after: Place in `args` from which on they belong to the command.
        function: The command.

    Returns:
        The same with underscores in names, flags without values, lists in brackets, and the name of
        the first option. Words beyond those that are required are the overrides, if the command
        has any.
    """
    rest = list(args[after:])
    first = next(iter(inspect.signature(function).parameters.values()))
    if rest and not rest[0].startswith("-") and first.default is not inspect.Parameter.empty:
        rest[:1] = [f"--{first.name}", rest[0]]
    flags, lists = _flags(function), _lists(function)
    parameters = inspect.signature(function).parameters
    required = sum(p.default is inspect.Parameter.empty for p in parameters.values())
    takes_words, words = _WORDS in parameters, list[str]()
    spelled = list(args[:after])
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            is_extra = takes_words and required <= 0 and not _awaits_value(spelled[after:], flags)
            required -= not _awaits_value(spelled[after:], flags)
            (words if is_extra else spelled).append(name + equals + value)
            continue
        name = name[2:].replace("-", "_")
        if not equals and _takes(rest[:1], name in flags, name in lists):
            equals, value = "=", rest.pop(0)
        if name in flags and value.lower() in _TRUTH:
            name, equals, value = name if _TRUTH[value.lower()] else f"no_{name}", "", ""
        if name in lists and _NUMBERS.fullmatch(value):
            value = f"[{value}]"
        spelled.append(f"--{name}{equals}{value}")
    return spelled + ([f"--{_WORDS}={json.dumps(words)}"] if words else [])


def as_one_line(error: ArgumentError) -> str:
    """Say in a line what is wrong with an option."""
    text = re.sub(r'Parser key "(\w+)":', r"--\1:", str(error))
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    return " ".join(text.split()).rstrip(".")


def _awaits_value(spelled: list[str], flags: Collection[str]) -> bool:
    """Whether the next word is the value of the option before it."""
    if not spelled or not spelled[-1].startswith("--") or "=" in spelled[-1]:
        return False
    return spelled[-1][2:].removeprefix("no_") not in flags


def _takes(following: list[str], flag: bool, several: bool) -> bool:
    """Whether the next argument is the value of a flag or of an option that takes a list."""
    if not following or following[0].startswith("--"):
        return False
    return following[0].lower() in _TRUTH if flag else several


def _flags(function: Callable[..., Any]) -> dict[str, bool]:
    """Name the parameters that are on or off, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool)}


def _lists(function: Callable[..., Any]) -> set[str]:
    """Name the parameters that take a list."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if "list[" in str(p.annotation)}


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
