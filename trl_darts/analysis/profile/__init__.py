"""
Measuring vLLM servers: seconds per token against batch size and context, and seconds until the first token. No command
line, and nothing is printed here.

[`ServerFacts`] say what a server holds, a [`Grid`] what is worth measuring, a [`ServerProbe`] measures one point on
one server, and [`profile_servers`] does all of it and fits the [`LatencyProfile`].
"""

from .grid import Grid, GridPoint, make_grid
from .measure import Decoded, ServerProbe
from .options import ProfileOptions
from .run import ProfileResult, profile_servers
from .servers import ServerFacts, learn


__all__ = [
    "Decoded",
    "Grid",
    "GridPoint",
    "ProfileOptions",
    "ProfileResult",
    "ServerFacts",
    "ServerProbe",
    "learn",
    "make_grid",
    "profile_servers",
]
