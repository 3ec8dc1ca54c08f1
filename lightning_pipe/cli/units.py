"""Sizes and times as people write them: ``80GiB``, ``100Gbit/s``, ``20us``."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\s*([0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = {f"{prefix}b": factor for prefix, factor in {**_PREFIXES, **_BINARY}.items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in {**_PREFIXES, **_BINARY}.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def size_in_bytes(text: str, option: str) -> float:
    """Read a number of bytes.

    Args:
        text: A number, with or without a unit.
        option: Named in the error.

    Raises:
        ValueError: If it is no size.
    """
    return _read(text, option, {"": 1, **_BYTES}, "80GiB, 512MB or a number of bytes")


def bytes_per_second(text: str, option: str) -> float:
    """Read a bandwidth; see `size_in_bytes`."""
    units = {"": 1, **_BYTES, **_BITS}
    units |= {f"{unit}/s": factor for unit, factor in units.items() if unit}
    return _read(text, option, units, "25GB/s, 100Gbit/s or a number of bytes per second")


def seconds(text: str, option: str) -> float:
    """Read a time; see `size_in_bytes`."""
    return _read(text, option, {"": 1.0, **_SECONDS}, "20us, 0.1ms or a number of seconds")


def _read(text: str, option: str, units: dict[str, float], examples: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is not None and match[2].lower() in units:
        try:
            return float(match[1]) * units[match[2].lower()]
        except ValueError:
            pass
    raise ValueError(f"--{option}={text} is not understood: expected {examples}")


def in_gib(number: float) -> str:
    """Write bytes for a table."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"
