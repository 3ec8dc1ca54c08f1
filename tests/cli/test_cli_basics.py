"""The command itself: help, exit codes, and how options may be written."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_pipe
from lightning_pipe.cli import COMMANDS, main

ENTRY = [sys.executable, "-m", "lightning_pipe"]


def failing(error: BaseException) -> Any:
    def command(number: int = 1) -> None:
        raise error

    return command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a function in the place of ``plan``; it counts as part of the package."""

    def put(function: Any) -> None:
        module = ModuleType("lightning_pipe.cli.plan")
        module.plan = function  # type: ignore[attr-defined]  # that is what is looked up
        monkeypatch.setitem(sys.modules, "lightning_pipe.cli.plan", module)
        function.__name__ = "plan"

    return put


def test_help_lists_all_commands_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"    {name} " in output
        assert summary in " ".join(output.split())
    assert "examples:\n  lightning-pipe show" in output
    modules = {f"lightning_pipe.cli.{name}" for name in COMMANDS}
    assert not (set(sys.modules) - before) & modules


def test_a_command_does_not_need_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(COMMANDS) - {"show"}:
        monkeypatch.setitem(sys.modules, f"lightning_pipe.cli.{name}", None)
    assert main(["show", "--json"]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert COMMANDS[name] in " ".join(output.split())
    assert f"examples:\n  lightning-pipe {name}" in output
    assert "--json" in output
    function = getattr(importlib.import_module(f"lightning_pipe.cli.{name}"), name)
    assert function.__doc__.startswith(COMMANDS[name])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == lightning_pipe.__version__


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "one of {show,plan,profile,check}"),
        (["shwo"], "invalid choice: 'shwo'"),
        (["show", "--nothing", "3"], "unrecognized arguments: --nothing 3"),
        (["show", "--ranks", "many"], "--ranks: "),
        (["show", "--json=perhaps"], "'perhaps'"),
        (["show", "gpip"], "Did you mean 'gpipe'?"),
        (["show", "missing.csv"], "missing.csv"),
    ],
)
def test_wrong_usage(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert message in written.err
    assert written.err.startswith("lightning-pipe")
    assert written.err.count("\n") == 1


def test_exit_codes(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for returned, code in ((None, 0), (0, 0), (1, 1)):
        command(lambda number=1, code=returned: code)
        assert main(["plan"]) == code
    for error, code in ((ValueError("two words"), 2), (KeyboardInterrupt(), 130)):
        command(failing(error))
        # Errors of the package are told by the module that raises them, so this one pretends.
        command_globals = failing.__globals__
        command_globals["__name__"], name = "lightning_pipe.test", command_globals["__name__"]
        try:
            assert main(["plan"]) == code
        finally:
            command_globals["__name__"] = name
    assert capsys.readouterr().err == "lightning-pipe plan: error: two words\n"


@pytest.mark.parametrize("error", [ValueError("of a user"), RuntimeError("nobody foresaw")])
def test_an_error_that_is_not_ours_keeps_its_traceback(error: Exception, command: Any) -> None:
    command(failing(error))
    with pytest.raises(type(error)) as caught:
        main(["plan"])
    assert caught.traceback[-1].name == "command"


def test_a_file_that_is_not_there(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda number=1: Path("nowhere.json").read_text() and None)
    assert main(["plan"]) == 2
    assert "nowhere.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([], {}),
        (["gpipe"], {"name": "gpipe"}),
        (["--name", "gpipe"], {"name": "gpipe"}),
        (["gpipe", "--two-words", "3"], {"name": "gpipe", "two_words": 3}),
        (["--two_words=3"], {"two_words": 3}),
        (["--times", "1,2.5"], {"times": [1.0, 2.5]}),
        (["--times=1e-3,2"], {"times": [0.001, 2.0]}),
        (["--times", "[1,2]"], {"times": [1.0, 2.0]}),
        (["--times", "4"], {"times": 4.0}),
        (["--on-demand"], {"on_demand": True}),
        (["--on-demand", "gpipe"], None),
        (["--on_demand=false"], {}),
        (["--on_demand", "true", "--two_words", "2"], {"on_demand": True, "two_words": 2}),
        (["--no-as-usual"], {"as_usual": False}),
        (["--as_usual", "false"], {"as_usual": False}),
        (["--name", "1,2"], {"name": "1,2"}),
    ],
)
def test_how_options_may_be_written(
    written: list[str], expected: dict[str, Any] | None, command: Any
) -> None:
    calls = []

    def function(
        name: str = "a",
        two_words: int = 1,
        times: float | list[float] = 1.0,
        on_demand: bool = False,
        as_usual: bool = True,
    ) -> None:
        calls.append((name, two_words, times, on_demand, as_usual))

    command(function)
    if expected is None:
        assert main(["plan", *written]) == 2
        return
    assert main(["plan", *written]) == 0
    defaults = {"name": "a", "two_words": 1, "times": 1.0, "on_demand": False, "as_usual": True}
    assert calls == [tuple((defaults | expected).values())]


def test_what_is_required_is_given_by_its_place(command: Any) -> None:
    calls = []

    def function(target: str, ranks: int = 2) -> None:
        calls.append((target, ranks))

    command(function)
    assert main(["plan", "--ranks", "3", "module.py"]) == 0
    assert main(["plan", "module.py"]) == 0
    assert main(["plan"]) == 2
    assert calls == [("module.py", 3), ("module.py", 2)]


def test_as_a_process_whose_reader_leaves() -> None:
    """``lightning-pipe show | head -1``, with more than a pipe holds."""
    args = [*ENTRY, "show", "gpipe", "--ranks", "100", "--microbatches", "60"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"gpipe, 100 ranks")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_the_installed_command_is_the_same() -> None:
    """As pip makes it of the project's file, which an editable install may not have read again."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, _, name = tomllib.loads(text)["project"]["scripts"]["lightning-pipe"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
