"""
Measures vLLM servers: seconds per token against batch size and context, and seconds until the first token.

`profiled_server` reads what a server reports, `grid` chooses the points, `probe` measures one of them, `profiler`
measures all and fits the [`LatencyProfile`], `display` describes and draws it. Nothing here prints.
"""

from .grid import ProfileOptions
from .profiler import ProfileResult, profile_servers


__all__ = ["ProfileOptions", "ProfileResult", "profile_servers"]
