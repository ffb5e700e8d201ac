"""Recipes: YAML files of a run's settings, on disk and on the Hub."""
