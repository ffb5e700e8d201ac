"""Checks for optional packages."""

import importlib.util


def is_matplotlib_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises `ImportError` with the command to install matplotlib if it is missing."""
    if not is_matplotlib_available():
        raise ImportError("Figures need matplotlib. Install it with `pip install 'trl-darts[report]'`.")


def is_ray_available() -> bool:
    return importlib.util.find_spec("ray") is not None
