"""`trl-darts config pull`: parses, hands over to `trl_darts.hub`, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ConfigurationError
from ..exits import fail


def pull(
    repo_id: Annotated[
        str,
        typer.Argument(metavar="REPO_ID[@REVISION]", help="Repository, and a branch, tag or commit of it."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The YAML file to write. It must not exist yet.", metavar="FILE")
    ] = Path("darts_config.yaml"),
) -> None:
    """
    Fetch a published config, check it, and write it to a file for `--config` of the training script.

    A config with an unknown field, or with one that could name a path, an address, an account or code, is refused.

    Example:

        trl-darts config pull org/name@main --output config.yaml
    """
    # They load torch, for which `--help` should not wait.
    from ...hub import pull_config

    try:
        if output.exists() or not output.parent.is_dir():
            words = "exists" if output.exists() else "is in a directory that does not exist"
            raise ConfigurationError(f"`output` ({str(output)!r}) must be a new file, and {words}. Choose another.")
        pulled = pull_config(repo_id)
        output.write_bytes(pulled.path.read_bytes())
    except (ConfigurationError, OSError) as error:  # with the Hub's, which is an `OSError`
        fail(str(error))
    typer.echo(f"From {pulled.repo_id}@{pulled.commit}", err=True)
    typer.echo(output)
