"""`trl-darts serve`: parses, hands over to `trl_darts.serving`, and prints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from ..errors import ConfigurationError
from ..serving import (
    ServeOptions,
    ServerFailedError,
    ServerProcess,
    StopRequest,
    Supervisor,
    TrainerArguments,
    check_options,
    find_build,
    make_commands,
)
from ..serving.options import API_KEY_VARIABLE
from .display import ServeDisplay
from .exits import fail


def serve(
    model: Annotated[str, typer.Argument(help="Directory of a checkpoint, or a model of the Hugging Face Hub.")],
    vllm_flags: Annotated[
        Optional[list[str]],  # noqa: UP045  typer reads the annotation at run time, also on Python 3.10
        typer.Argument(metavar="[-- VLLM FLAGS]", help="Flags of vLLM, handed to every server.", show_default=False),
    ] = None,
    num_servers: Annotated[int, typer.Option(help="Number of servers, all with the same model.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share one copy of the model.")] = 1,
    devices: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="GPUs of all servers together, such as 0,1,2,3. By default the last ones.", metavar="LIST"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Any but a loopback one needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the first server. The next server takes the next one.")] = 8000,
    speculative: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Speculative decoding without a draft model: suffix or ngram.", metavar="METHOD"),
    ] = None,
    max_model_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Tokens of prompt and completion together. The model's own limit by default."),
    ] = None,
    weight_sync: Annotated[
        str, typer.Option(help="auto, nccl, gloo or filesystem: how the trainer's weights arrive.", metavar="WAY")
    ] = "auto",
    restart: Annotated[bool, typer.Option("--restart", help="Start a server again that died.")] = False,
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Key that requests to /v1 must carry.", envvar=API_KEY_VARIABLE, show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds in which a server must be healthy.")] = 600.0,
    log_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Directory of the servers' logs. A temporary one by default."),
    ] = None,
) -> None:
    """
    Start vLLM servers for a trainer, and print the trainer's arguments. Ctrl-C ends all of them.

    Progress goes to standard error, the arguments to standard output.

    Example:

        trl-darts serve Qwen/Qwen2.5-7B --num-servers 2 --devices 2,3 -- --gpu-memory-utilization 0.85
    """
    options = ServeOptions(
        model=model,
        num_servers=num_servers,
        tensor_parallel_size=tensor_parallel_size,
        devices=None if devices is None else tuple(name.strip() for name in devices.split(",")),
        host=host,
        port=port,
        speculative=speculative,
        max_model_len=max_model_len,
        weight_sync=weight_sync,
        api_key=api_key,
        vllm_flags=tuple(vllm_flags or ()),
    )
    try:
        _serve(options, timeout, log_dir, restart)
    except ConfigurationError as error:
        fail(str(error))
    except ServerFailedError as error:
        fail(str(error), error.exit_code)


def _serve(options: ServeOptions, timeout_s: float, log_dir: Path | None, restart: bool) -> None:
    if not timeout_s > 0:
        raise ConfigurationError(f"`timeout` ({timeout_s:g}) must be a positive number of seconds.")
    build = find_build()
    check_options(options, build)
    commands = make_commands(options, build)
    log_dir = _make_log_dir(log_dir)
    arguments = TrainerArguments.of(options, build, commands)
    display = ServeDisplay(Console(stderr=True), on_ready=lambda: _print_arguments(arguments))
    display.event(f"vLLM {build.version}{' (CPU build)' if build.cpu else ''}, logs in {log_dir}")
    display.event(f"$ {commands[0]}")
    servers = [ServerProcess(command, log_dir / f"server-{command.port}.log") for command in commands]
    with StopRequest() as stop:
        try:
            Supervisor(servers, timeout_s, restart).run(display, stop)
        finally:
            display.close()
    display.event(f"All servers have ended. Logs: {log_dir}")


def _make_log_dir(log_dir: Path | None) -> Path:
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="trl_darts_serve_"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"`log_dir` ({str(log_dir)!r}) must be a directory that can be made: {error.strerror}. Choose another, or "
            "leave it out for a temporary one."
        ) from error
    return log_dir


def _print_arguments(arguments: TrainerArguments) -> None:
    lines = [arguments.as_python(), "", "or, for a script:", "", arguments.as_flags(), *arguments.notes]
    typer.echo("\n".join(["The trainer's arguments:", "", *lines, ""]))
