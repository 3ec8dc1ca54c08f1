"""``python -m lightning_pipe``: the same as the command ``lightning-pipe``."""

from __future__ import annotations

import sys

from lightning_pipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
