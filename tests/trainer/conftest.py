from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that serve as the ranks of all tests."""
    ranks = Ranks()
    yield ranks
    ranks.close()
