"""The one error that this package raises."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule, a placement or a plan that cannot work.

    The message says what was given, what was expected, and what to change; for a broken plan it
    also draws the plan with the bad cell marked.
    """
