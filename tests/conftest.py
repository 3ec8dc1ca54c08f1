"""What the tests of several folders share.

`tests/lightning` must not become a package (no `__init__.py`): this folder is on the path, and it
would take the place of Lightning itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trainer.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that serve as the ranks of all tests."""
    ranks = Ranks()
    yield ranks
    ranks.close()
