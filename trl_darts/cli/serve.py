"""`trl-darts serve`: parses the options, runs `trl_darts.serving` and prints."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..engines.addresses import API_KEY_VARIABLE, published
from ..engines.server_list import ServerList
from ..engines.waiting import INTERVAL_S as LINE_INTERVAL_S
from ..serving.build import VLLMBuild, find_build
from ..serving.command import (
    ServerCommand,
    as_flags,
    as_python,
    make_commands,
    trainer_arguments,
    trainer_notes,
)
from ..serving.options import ServeOptions, check_options, check_place, log_directory, with_own_key


if TYPE_CHECKING:
    from ..serving.on_ray import RayServers
    from ..serving.supervisor import Supervisor


Model = Annotated[str, typer.Argument(help="Directory of a checkpoint, or a model of the Hugging Face Hub.")]
Flags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- VLLM FLAGS]", help="Flags of vLLM for every server.", show_default=False),
]
NumServers = Annotated[int, typer.Option(help="Number of servers, all with the same model.")]
TensorParallelSize = Annotated[int, typer.Option(help="GPUs that share one copy of the model.")]
LAYOUT = (
    "Main servers and tail servers on the same GPUs, as servers × GPUs each, such as 4x1+1x4. On a CPU, as servers × "
    "threads."
)
Devices = Annotated[
    str | None,
    typer.Option(help="GPUs of all servers together, such as 0,1,2,3. By default the last ones.", metavar="LIST"),
]
Host = Annotated[str, typer.Option(help="Address to listen on. Requires a key unless it is a loopback address.")]
Port = Annotated[int, typer.Option(help="Port of the first server. The others use the following ports.")]
Speculative = Annotated[
    str | None, typer.Option(help="Speculative decoding without a draft model: suffix or ngram.", metavar="METHOD")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of prompt and completion together. The model's own limit by default.")
]
WeightSync = Annotated[
    str, typer.Option(help="How the trainer sends weights: auto, nccl, filesystem or adapter.", metavar="WAY")
]
LoRARank = Annotated[
    int | None,
    typer.Option(help="Load LoRA adapters up to this rank while running, so that a sync sends the adapter alone."),
]
Restart = Annotated[bool, typer.Option("--restart", help="Restart servers that die, while the others keep running.")]
NO_KEY = "On a loopback address: let every user of the machine use the servers, without a key."
Timeout = Annotated[float, typer.Option(help="Seconds until a server must be healthy.")]
LogDir = Annotated[Path | None, typer.Option(help="Directory for the servers' logs. A temporary one by default.")]
OUTPUT = "File with the addresses of the healthy servers, for the trainer's `vllm_server_list`."
Place = Annotated[
    str | None, typer.Option(help="Where the servers run: ray, on a Ray cluster. Default: here.", metavar="PLACE")
]
Name = Annotated[str, typer.Option(help="With `--on ray`: name by which trainers find the servers.")]
JOIN = "With `--on ray`: add servers to those of a running command by `--name`."
PLACEMENT = "With `--on ray`: spread over the nodes, or pack on few."
RAY = (
    "With `--on ray`: address of the cluster. By default RAY_ADDRESS, or the cluster that this machine belongs to, or "
    "a new one on this machine."
)


def serve(
    model: Model,
    vllm_flags: Flags = None,
    num_servers: NumServers = 1,
    tensor_parallel_size: TensorParallelSize = 1,
    layout: Annotated[str | None, typer.Option(help=LAYOUT, metavar="LAYOUT")] = None,
    devices: Devices = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    speculative: Speculative = None,
    max_model_len: MaxModelLen = None,
    weight_sync: WeightSync = "auto",
    lora_rank: LoRARank = None,
    restart: Restart = False,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help=NO_KEY)] = False,
    timeout: Timeout = 1800.0,
    log_dir: LogDir = None,
    output: Annotated[Path | None, typer.Option(help=OUTPUT, metavar="FILE")] = None,
    on: Place = None,
    name: Name = "trl-darts",
    join: Annotated[bool, typer.Option("--join", help=JOIN)] = False,
    placement: Annotated[str, typer.Option(help=PLACEMENT, metavar="WAY")] = "spread",
    ray_address: Annotated[str | None, typer.Option(help=RAY, metavar="ADDRESS")] = None,
) -> None:
    """
    Start vLLM servers for a trainer, and print the trainer's arguments. Ctrl-C stops all servers.

    Progress goes to standard error, the arguments to standard output. Requests must have the key of the environment
    variable VLLM_API_KEY. Without it, one is made for you on a loopback address.

    Example:

        trl-darts serve Qwen/Qwen2.5-7B --num-servers 2 --devices 2,3 -- --gpu-memory-utilization 0.85
    """
    # The parameters are its fields. Every user of the machine can read a command line, so the key is not among them.
    start(ServeOptions(**locals(), api_key=os.environ.get(API_KEY_VARIABLE)))


def start(options: ServeOptions) -> None:
    """Checks the options, and runs the servers until a signal or a failure."""
    check_place(options)
    if options.on == "ray":
        start_on_ray(options)
    else:
        start_here(options)


def start_here(options: ServeOptions) -> None:
    """Runs the servers on this machine."""
    from ..serving.supervisor import Server, Supervisor, counted_signals  # loads an HTTP client

    build, options = find_build(), with_own_key(options)
    check_options(options, build)
    commands = make_commands(options, build)
    urls = [command.base_url for command in commands]
    logs = log_directory(options.log_dir)
    servers = [
        Server(command, logs / f"server-{port}.log") for command, port in zip(commands, options.ports, strict=True)
    ]
    supervisor = Supervisor(servers, options.timeout, options.restart, takes_turns=options.takes_turns(build))
    display = Display(supervisor, options, shown_arguments(options, build, urls[0], commands))
    display.print(f"vLLM {build}, logs in {logs}")
    display.print(f"$ {commands[0]}")
    with counted_signals() as stop, published(options.own_key, urls), display:
        supervisor.run(stop, display.report)
    display.print(f"All servers have ended. Logs: {logs}")


def start_on_ray(options: ServeOptions) -> None:
    """Runs the servers on a Ray cluster."""
    from ..serving.on_ray import RayServers, connect
    from ..serving.supervisor import counted_signals

    address = connect(options.ray_address)
    servers = RayServers(options)
    with counted_signals() as stop:
        try:
            servers.prepare()
            first = servers.prepared[0]
            display = Display(servers, options, shown_arguments(servers.options, first.build, first.url))
            for one in servers.prepared:
                display.print(f"vLLM {one.build}, log: {one.log_path}")
            display.print(f"Ray cluster at {address}")
            display.print(f"$ {first.command}")
            with display:
                servers.run(stop, display.report)
        finally:
            servers.end(stop)
    display.print("All servers have ended.")


def shown_arguments(
    options: ServeOptions, build: VLLMBuild, first_url: str, commands: Sequence[ServerCommand] = ()
) -> str:
    arguments = trainer_arguments(options, build, commands)
    notes = trainer_notes(options, build, first_url)
    shown = [as_python(arguments), "", "or, for a script:", "", as_flags(arguments), *notes]
    return "\n".join(["The trainer's arguments:", "", *shown, ""])


class Display:
    """
    Shows progress on standard error, and the arguments on standard output once all servers are healthy. Keeps the file
    of `--output` up to date, which is removed at the end.
    """

    def __init__(self, supervisor: Supervisor | RayServers, options: ServeOptions, arguments: str) -> None:
        self.supervisor = supervisor
        self._output = options.output
        self._num_servers = sum(part.num_servers for part in options.sets[:1])
        self._listed: ServerList | None = None
        self.console = Console(stderr=True)
        self.status = self.console.status("")
        self._arguments: str | None = arguments
        self._next_line_at = 0.0

    def print(self, text: str) -> None:
        """Prints a line, above the spinner if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self, messages: list[str]) -> None:
        """Prints messages of the supervisor, and the arguments once all servers are healthy."""
        for message in messages:
            self.print(message)
        self._write_list()
        if not self.supervisor.is_ready:
            self._progress()
            return
        self.status.stop()
        if self._arguments is not None:
            typer.echo(self._arguments)
            self._arguments = None

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.status.stop()
        if self._output is not None and self._listed is not None:
            self._output.unlink(missing_ok=True)

    def _write_list(self) -> None:
        found = ServerList(tuple(self.supervisor.urls), self._num_servers)
        if self._output is not None and found != self._listed and (found.urls or self._listed):
            found.write(self._output)
            self._listed = found

    def _progress(self) -> None:
        """Shows a spinner in a terminal, or prints a line every ten seconds."""
        if self.console.is_terminal:
            self.status.update("\n".join(self.supervisor.describe()))
            self.status.start()
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + LINE_INTERVAL_S
            self.print("; ".join(self.supervisor.describe()))
