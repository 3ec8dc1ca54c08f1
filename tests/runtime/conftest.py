"""Keep what Lightning says about itself out of the reports."""

import logging

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
