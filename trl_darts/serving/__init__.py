"""
Starting vLLM servers for a trainer, watching them and ending them. No command line, and nothing is printed here.

What is asked for ([`ServeOptions`]) and what is installed ([`VLLMBuild`]) become one [`ServerCommand`] per server, or
a `ConfigurationError` before any process exists. [`ServerProcess`] runs one command behind a guard, [`Supervisor`]
runs them all.
"""

from .build import VLLMBuild, find_build
from .checks import check_options
from .command import ServerCommand, make_commands
from .options import ServeOptions
from .processes import ServerFailedError, ServerProcess
from .supervisor import Reporter, StopRequest, Supervisor
from .trainer_arguments import TrainerArguments


__all__ = [
    "Reporter",
    "ServeOptions",
    "ServerCommand",
    "ServerFailedError",
    "ServerProcess",
    "StopRequest",
    "Supervisor",
    "TrainerArguments",
    "VLLMBuild",
    "check_options",
    "find_build",
    "make_commands",
]
