"""Offline: profile an engine, simulate schedules, report on runs."""
