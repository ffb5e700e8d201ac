"""`trl-darts serve`: parses the options, runs `trl_darts.serving` and prints."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..analysis.output_files import check_directory
from ..engines.addresses import API_KEY_VARIABLE
from ..engines.waiting import INTERVAL_S as LINE_INTERVAL_S
from ..serving.build import find_build
from ..serving.command import as_flags, as_python, make_commands, trainer_arguments, trainer_notes
from ..serving.options import ServeOptions, check_options


if TYPE_CHECKING:
    from ..serving.supervisor import Supervisor


def serve(
    model: Annotated[str, typer.Argument(help="Directory of a checkpoint, or a model of the Hugging Face Hub.")],
    vllm_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM FLAGS]", help="Flags of vLLM for every server.", show_default=False),
    ] = None,
    num_servers: Annotated[int, typer.Option(help="Number of servers, all with the same model.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share one copy of the model.")] = 1,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Main servers and tail servers on the same GPUs, as servers × GPUs each, such as 4x1+1x4. On a CPU, "
            "as servers × threads.",
            metavar="LAYOUT",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="GPUs of all servers together, such as 0,1,2,3. By default the last ones.", metavar="LIST"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Requires a key unless it is a loopback address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the first server. The others use the following ports.")] = 8000,
    speculative: Annotated[
        str | None,
        typer.Option(help="Speculative decoding without a draft model: suffix or ngram.", metavar="METHOD"),
    ] = None,
    draft_history: Annotated[
        Path | None, typer.Option(help="Directory with earlier answers for drafts. New answers are added to it.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and completion together. The model's own limit by default.")
    ] = None,
    weight_sync: Annotated[
        str, typer.Option(help="How the trainer sends weights: auto, nccl or filesystem.", metavar="WAY")
    ] = "auto",
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart servers that die, while the others keep running.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that requests must have.", envvar=API_KEY_VARIABLE, show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a server must be healthy.")] = 600.0,
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory for the servers' logs. A temporary one by default.")
    ] = None,
) -> None:
    """
    Start vLLM servers for a trainer, and print the trainer's arguments. Ctrl-C stops all servers.

    Progress goes to standard error, the arguments to standard output.

    Example:

        trl-darts serve Qwen/Qwen2.5-7B --num-servers 2 --devices 2,3 -- --gpu-memory-utilization 0.85
    """
    start(ServeOptions(**locals()))  # the parameters are its fields


def start(options: ServeOptions) -> None:
    """Checks the options, and runs the servers until a signal or a failure."""
    from ..serving.supervisor import Server, Supervisor, counted_signals  # loads an HTTP client

    build = find_build()
    check_options(options, build)
    commands = make_commands(options, build)
    logs = _log_dir(options.log_dir)
    servers = [
        Server(command, logs / f"server-{port}.log") for command, port in zip(commands, options.ports, strict=True)
    ]
    arguments = trainer_arguments(options, build, commands)
    shown = [as_python(arguments), "", "or, for a script:", "", as_flags(arguments), *trainer_notes(options, build)]
    supervisor = Supervisor(servers, options.timeout, options.restart, takes_turns=options.takes_turns(build))
    display = Display(supervisor, "\n".join(["The trainer's arguments:", "", *shown, ""]))
    display.print(f"vLLM {build.version}{' (CPU build)' if build.cpu else ''}, logs in {logs}")
    display.print(f"$ {commands[0]}")
    with counted_signals() as stop:
        try:
            supervisor.run(stop, display.report)
        finally:
            display.status.stop()
    display.print(f"All servers have ended. Logs: {logs}")


def _log_dir(log_dir: Path | None) -> Path:
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="trl_darts_serve_"))
    check_directory("log_dir", log_dir)
    return log_dir


class Display:
    """Shows progress on standard error, and the arguments on standard output once all servers are healthy."""

    def __init__(self, supervisor: Supervisor, arguments: str) -> None:
        self.supervisor = supervisor
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
        if not self.supervisor.is_ready:
            self._progress()
            return
        self.status.stop()
        if self._arguments is not None:
            typer.echo(self._arguments)
            self._arguments = None

    def _progress(self) -> None:
        """Shows a spinner in a terminal, or prints a line every ten seconds."""
        if self.console.is_terminal:
            self.status.update("\n".join(self.supervisor.describe()))
            self.status.start()
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + LINE_INTERVAL_S
            self.print("; ".join(self.supervisor.describe()))
