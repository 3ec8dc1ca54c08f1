"""Which part of the package may import which (DESIGN.md, section 10)."""

import ast
from pathlib import Path

import pytest

import lightning_pipe

ROOT = Path(lightning_pipe.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PARTS = ("schedule", "runtime", "partition", "planning", "views", "cli")


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """The modules that a file imports anywhere; `from a import b` may mean `a.b`, so both."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, line {node.lineno}"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def inside(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def of_package(path):
    """What a file imports of the package itself."""
    return {name for name in imported(path) if inside(name, "lightning_pipe")}


def files_of(part):
    return [path for path in FILES if inside(module_name(path), f"lightning_pipe.{part}")]


def test_there_are_files_to_look_at():
    assert all(len(files_of(part)) > 3 for part in PARTS)
    assert "lightning_pipe.strategy" in map(module_name, FILES)


@pytest.mark.parametrize(
    ("part", "allowed"),
    [
        ("schedule", ["lightning_pipe.schedule"]),
        ("runtime", ["lightning_pipe.runtime", "lightning_pipe.schedule.instructions"]),
        ("partition", ["lightning_pipe.partition"]),
        (
            "planning",
            [
                "lightning_pipe.planning",
                "lightning_pipe.schedule",
                "lightning_pipe.partition.profile",
                "lightning_pipe.runtime.mesh",
            ],
        ),
        ("views", ["lightning_pipe.views", "lightning_pipe.schedule"]),
    ],
)
def test_parts_import_only_what_lies_below_them(part, allowed):
    wrong = {
        f"{module_name(path)} imports {name}"
        for path in files_of(part)
        for name in of_package(path)
        if not inside(name, *allowed)
    }
    assert not wrong


def test_schedules_are_pure_python():
    wrong = {
        f"{module_name(path)} imports {name}"
        for path in files_of("schedule")
        for name in imported(path)
        if inside(name, "torch", "lightning", "numpy")
    }
    assert not wrong


def test_only_the_package_itself_imports_the_strategy():
    importers = {
        module_name(path)
        for path in FILES
        if any(inside(name, "lightning_pipe.strategy") for name in of_package(path))
    }
    assert importers == {"lightning_pipe"}


def test_only_the_command_line_imports_the_command_line():
    wrong = {
        f"{module_name(path)} imports {name}"
        for path in FILES
        for name in of_package(path)
        if inside(name, "lightning_pipe.cli")
        and not inside(module_name(path), "lightning_pipe.cli", "lightning_pipe.__main__")
    }
    assert not wrong


def test_hydra_is_imported_only_to_read_configurations():
    importers = {
        module_name(path)
        for path in FILES
        if any(inside(name, "hydra", "omegaconf") for name in imported(path))
    }
    assert importers == {"lightning_pipe.cli.configuration"}
