"""The package's exceptions: one base class, and each error is also the standard type that a caller would catch."""

from collections.abc import Iterable
from difflib import get_close_matches


class TRLDARTSError(Exception):
    """Base class of every error that `trl_darts` raises on purpose."""


class ConfigurationError(TRLDARTSError, ValueError):
    """
    A setting, or a combination of settings, that can't work. Names the argument, its value, the rule and the remedy.
    """


class UnsupportedTRLError(TRLDARTSError, ImportError):
    """The installed TRL lacks something that `trl_darts` overrides or calls. Names it."""


class StateMismatchError(TRLDARTSError, ValueError):
    """A saved state does not belong to the object that should load it. Prints both sets of keys."""


class GenerationError(TRLDARTSError, RuntimeError):
    """An engine failed while generating. Carries the engine's own words."""


class GenerationTimeoutError(GenerationError, TimeoutError):
    """An engine did not answer within its deadline."""


class WeightsLostError(GenerationError):
    """No server has the weights any more that a rollout was launched with, and the trainer has others by now."""


class WeightSyncError(TRLDARTSError, RuntimeError):
    """The engine could not be brought to the trainer's weights."""


class HubError(TRLDARTSError, OSError):
    """The Hub can't be reached, or refuses. Names what was asked for, and the remedy."""

    exit_code = 2  # of commands


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """The end of an error's message: which of the choices come close, if any do."""
    close = get_close_matches(str(value), list(choices), n=3)
    return f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
