"""What is only there if the user asked for it when installing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_matplotlib() -> Iterator[None]:
    """Say what to install where matplotlib is missing.

    Raises:
        ImportError: If the block cannot import matplotlib.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "Pictures are drawn by matplotlib, which is not installed: "
            "pip install 'lightning-pipe[plot]'"
        ) from error
