"""What goes wrong between here and the Hub."""

from ..errors import TRLDARTSError


class HubError(TRLDARTSError, OSError):
    """The Hub can't be reached, or refuses. Names what was asked for, and the remedy."""
