"""
Configs on the Hub. A published config is data that others run: only fields that mean the same everywhere leave this
machine, and nothing comes back that could name a path, an address, an account or code.
"""

from .arguments import resolve_config_arguments
from .errors import HubError
from .mixin import PublishedConfig
from .transfer import Pulled, Pushed, pull_config, push_config


__all__ = [
    "HubError",
    "PublishedConfig",
    "Pulled",
    "Pushed",
    "pull_config",
    "push_config",
    "resolve_config_arguments",
]
