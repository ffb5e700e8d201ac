"""Writes and reads a run's metrics, traces and log, and shows its progress."""
