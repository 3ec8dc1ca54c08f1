"""Let Python find the user's modules, as it would if a script of his were run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException


def look_in(directory: Path) -> None:
    """Let Python find modules in a directory first."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def find_packages(names: Iterable[str], project: Path) -> None:
    """Let Python find what a configuration names.

    Python looks into the directory of the script that it runs. Which script reads a configuration
    is unknown, but it is likely to lie in the project's directory or in one below.

    Args:
        names: Dotted names of classes and functions.
        project: The directory.

    Raises:
        MisconfigurationException: The module of one is nowhere, or in several places.
    """
    for top in {name.partition(".")[0] for name in names}:
        if top in sys.modules:
            continue
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.origin is not None:
            continue
        places = {file.parent for file in project.glob(f"*/{top}.py")}
        places |= {file.parent.parent for file in project.glob(f"*/{top}/__init__.py")}
        if not places and spec is not None:  # a package without __init__.py
            continue
        if len(places) != 1:
            where = f"several in {', '.join(map(str, sorted(places)))}" if places else "none there"
            raise MisconfigurationException(
                f"The configuration names the Python module {top!r}, but it is not where Python "
                f"looks, and of the directories in {project} there are {where}. Say where it is: "
                "PYTHONPATH=directory lightning-pipe ..."
            )
        look_in(places.pop())
