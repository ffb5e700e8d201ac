"""`trl-darts config push`: parses, hands over to `trl_darts.hub`, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ...errors import ConfigurationError
from ..exits import fail


# typer reads these at run time, also on Python 3.10, which has no `str | None` there.
_File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file for `--config` of the training script.")]
_RepoId = Annotated[str, typer.Argument(metavar="REPO_ID", help="Repository, org/name. Made if there is none.")]
_Private = Annotated[bool, typer.Option("--private", help="Make a new repository private, and refuse a public one.")]
_Branch = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Branch to commit to, made if there is none. By default main.", metavar="BRANCH"),
]
_Without = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="A field of the file to leave out. Repeat it for several.", metavar="FIELD"),
]
_Measured = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="What the card says of its effect: hardware, data, figures.", metavar="TEXT"),
]
_Message = Annotated[str, typer.Option(help="Of the commit.", metavar="TEXT")]


def push(
    file: _File,
    repo_id: _RepoId,
    private: _Private = False,
    revision: _Branch = None,
    without: _Without = None,
    measured: _Measured = None,
    message: _Message = "Upload config",
) -> None:
    """
    Publish a config on the Hub: its fields that differ from the defaults, and a card.

    Secrets, paths, addresses, accounts and what loads code never leave; docs/hub.md has the list. The token is that
    of `hf auth login`, or `HF_TOKEN`.

    Example:

        trl-darts config push configs/tiny_reasoner.yaml me/tiny --without model_name_or_path --without reward_funcs
    """
    # They load torch, for which `--help` should not wait.
    from ...hub import HubError, push_config
    from ...hub.files import read_yaml

    try:
        pushed = push_config(
            read_yaml(file),
            repo_id,
            without=without or (),
            private=private or None,  # `None` leaves it to the organization's rule
            revision=revision,
            commit_message=message,
            measured=measured,
        )
    except (ConfigurationError, HubError) as error:
        fail(str(error))
    if pushed.left_out:
        typer.echo(f"Left out, to be set where the training is started: {', '.join(pushed.left_out)}", err=True)
    typer.echo(f"{repo_id}@{pushed.commit}")
