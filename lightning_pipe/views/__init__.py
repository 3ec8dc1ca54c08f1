"""Schedules for the eye: in a terminal, as a picture, as a trace for Perfetto."""
