"""`trl-darts check`: checks running servers from the trainer's machine."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..engines.addresses import API_KEY_VARIABLE, check_address, split_addresses
from ..errors import ConfigurationError
from ..scheduling.rules import one_of
from ..weights import WEIGHT_SYNCS


COLUMNS = ("model", "dtype", "max_model_len", "slots", "vllm", "trl_darts", "weights")


def check(
    servers: Annotated[
        str,
        typer.Argument(help="Addresses with commas, or a value of `vllm_server_list`: a file, a directory, ray:NAME."),
    ],
    weight_sync: Annotated[
        str, typer.Option(help="How the trainer will send weights: auto, nccl, filesystem or adapter.", metavar="WAY")
    ] = "auto",
    weight_sync_dir: Annotated[
        Path | None, typer.Option(help="Directory for weights as files. Default: one on this machine.", metavar="DIR")
    ] = None,
    group_port: Annotated[int, typer.Option(help="First port for NCCL, the trainer's `vllm_group_port`.")] = 51216,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 10.0,
) -> None:
    """
    Check servers from the trainer's machine: reachable, alike, and able to get weights from here.

    The key is read from VLLM_API_KEY. Exits with code 1 if something is wrong.

    Example:

        trl-darts check servers.json --weight-sync-dir /shared/weights
    """
    one_of(WEIGHT_SYNCS).check("weight_sync", weight_sync)
    if timeout <= 0:
        raise ConfigurationError(f"`timeout` ({timeout:g}) must be positive.")
    urls = _find(servers)
    from ..engines.check import check_servers, way_back  # loads an HTTP client

    with way_back(_resolved(weight_sync, weight_sync_dir), weight_sync_dir, group_port) as way:
        key = os.environ.get(API_KEY_VARIABLE) or None
        checked = check_servers(urls, way, key, timeout, adapters=weight_sync == "adapter")
    table = Table("server", *COLUMNS, box=None, pad_edge=False)
    for one in checked:
        table.add_row(one.url, *(getattr(one, name) or "?" for name in COLUMNS))
    Console(width=None if Console().is_terminal else 160).print(table)
    problems = [f"{one.url}: {problem}" for one in checked for problem in one.problems]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)


def _find(servers: str) -> list[str]:
    """Returns the addresses of an argument. A list that a trainer uses is refused."""
    if "://" in servers:
        urls = split_addresses(servers)
        for url in urls:
            check_address("servers", url)
        return urls
    from ..engines.connection import listed_urls

    return listed_urls(servers)


def _resolved(weight_sync: str, directory: Path | None) -> str:
    import torch

    from ..weights.fleet import resolve_weight_sync

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if weight_sync == "auto" and directory is not None:
        return "filesystem"
    return resolve_weight_sync(weight_sync, device, directory)
