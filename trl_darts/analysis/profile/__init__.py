"""
Measuring vLLM servers: seconds per token against batch size and context, and seconds until the first token.

`servers` asks what a server holds, `grid` decides what is worth measuring, `measure` measures one point on one server,
`run` does all of it and fits the [`LatencyProfile`], `picture` and `summary` show it. Nothing is printed here.
"""

from .grid import ProfileOptions
from .run import ProfileResult, profile_servers


__all__ = ["ProfileOptions", "ProfileResult", "profile_servers"]
