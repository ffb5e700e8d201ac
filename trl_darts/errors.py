"""Exceptions with one base class. Each is also a standard type that a caller would catch."""

from collections.abc import Iterable
from difflib import get_close_matches


class TRLDARTSError(Exception):
    """Base class of all errors of `trl_darts`."""


class ConfigurationError(TRLDARTSError, ValueError):
    """Raised for settings that can't work. The message names the argument, its value, the rule and a remedy."""


class UnsupportedTRLError(TRLDARTSError, ImportError):
    """Raised if the installed TRL lacks a hook that `trl_darts` overrides or calls. The message names it."""


class StateMismatchError(TRLDARTSError, ValueError):
    """Raised if a saved state does not belong to the object that loads it. The message has both sets of keys."""


class GenerationError(TRLDARTSError, RuntimeError):
    """Raised if an engine fails while it generates. The message includes the engine's."""


class GenerationTimeoutError(GenerationError, TimeoutError):
    """Raised if an engine does not answer within its deadline."""


class EnvironmentLost(TRLDARTSError, RuntimeError):
    """
    Raise it in a method of an environment that can't go on, for example because its container is gone. The model is
    then not told an error, as with other exceptions: its conversation begins again, in a new environment.
    """


class WeightsLostError(GenerationError):
    """Raised if no server has a rollout's weights any more, and the trainer has newer ones."""


class WeightSyncError(TRLDARTSError, RuntimeError):
    """Raised if an engine can't be updated to the trainer's weights."""


class HubError(TRLDARTSError, OSError):
    """Raised if the Hub can't be reached or rejects a request. The message names what was requested and a remedy."""

    exit_code = 2  # of commands


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """Returns the end of an error message with the choices that are similar to `value`, if any."""
    close = get_close_matches(str(value), list(choices), n=3)
    return f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
