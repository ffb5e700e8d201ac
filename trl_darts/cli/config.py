"""`trl-darts config`: check recipes before they run, publish them, and fetch published ones."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import TRLDARTSError
from ..fields import check_values, read_values, read_yaml
from ..hub_connection import check_hub
from .exits import USAGE_ERROR, fail


app = typer.Typer(no_args_is_help=True, help="Check a config, publish it on the Hub, or fetch a published one.")

# torch and TRL take seconds to load, for which `--help` should not wait: they are imported in the commands.


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML files for `examples/train_grpo.py`.")],
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that train. Default: the accelerate config's, or 1.")
    ] = None,
    accelerate_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `accelerate launch --config_file` gets.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts in the data set, where the recipe has no `num_prompts`.")
    ] = None,
    max_prompt_length: Annotated[int, typer.Option(min=0, help="Tokens of the longest prompt in the data set.")] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="What `trl-darts serve --max-model-len` gets.")
    ] = None,
) -> None:
    """
    Check recipes: fields, batch arithmetic, lengths, and what the trainer would refuse.

    Nothing is loaded, and no GPU is needed. Exit code 2 if a training would fail.

    Example:

        trl-darts config check configs/tiny_reasoner.yaml --num-processes 2
    """
    launch = {} if accelerate_config is None else read_yaml(accelerate_config)
    num_processes = num_processes or int(launch.get("num_processes") or 1)
    has_failed = False
    for path in files:  # all of them, also after one that fails
        try:
            check_values(read_values(path), num_processes)  # most of what is wrong is told before they are loaded
            from ..analysis.recipe import check_lengths, read_recipe

            recipe = read_recipe(path, num_processes)
            check_lengths(recipe, max_prompt_length, max_model_len)
            rows = recipe.rows(num_prompts)
        except TRLDARTSError as error:
            where = f"{path}: "
            typer.echo(f"Error: {where}{str(error).removeprefix(where)}", err=True)
            has_failed = True
            continue
        typer.echo("\n".join([f"{path}", *(f"{name:<18}{value}" for name, value in rows.items()), ""]))
        for warning in recipe.warnings(is_fsdp=launch.get("distributed_type") == "FSDP"):
            typer.echo(f"Warning: {path}: {warning}", err=True)
    if has_failed:
        raise typer.Exit(USAGE_ERROR)


@app.command()
def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file for `--config` of the training script.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Repository, org/name. Made if there is none.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private, and refuse a public one.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to commit to, made if there is none. By default main.", metavar="BRANCH")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="A field of the file to leave out. Repeat it for several.", metavar="FIELD"),
    ] = None,
    measured: Annotated[
        str | None, typer.Option(help="What the card says of its effect: hardware, data, figures.", metavar="TEXT")
    ] = None,
    message: Annotated[str, typer.Option(help="Of the commit.", metavar="TEXT")] = "Upload config",
) -> None:
    """
    Publish a config on the Hub: its fields, and a card.

    Secrets, paths, addresses, accounts and what loads code never leave; docs/recipes.md has the list. The token is
    that of `hf auth login`, or `HF_TOKEN`.

    Example:

        trl-darts config push configs/tiny_reasoner.yaml me/tiny --without model_name_or_path --without reward_funcs
    """
    read_values(file)  # what is wrong with it, or with the network, is told before they are loaded
    check_hub(repo_id)
    from ..analysis.recipe import read_fields
    from ..hub import push_config

    pushed = push_config(
        read_fields(file),
        repo_id,
        without=without or (),
        private=private or None,  # `None` leaves it to the organization's rule
        revision=revision,
        commit_message=message,
        measured=measured,
    )
    if pushed.left_out:
        typer.echo(f"Left out, to be set where the training is started: {', '.join(pushed.left_out)}", err=True)
    typer.echo(f"{repo_id}@{pushed.commit}")


@app.command()
def pull(
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID[@REVISION]", help="Repository, and a branch, tag or commit of it.")
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
    name, _, revision = repo_id.removeprefix("hf://").partition("@")
    check_hub(name, revision or None, cached=True)
    from ..analysis.recipe import read_fields
    from ..hub import pull_config

    pulled = pull_config(repo_id)
    read_fields(pulled.path)
    try:
        with output.open("xb") as file:
            file.write(pulled.path.read_bytes())
    except FileExistsError:
        fail(f"`output` ({str(output)!r}) must be a new file, and exists. Choose another.")
    typer.echo(f"From {pulled.address}", err=True)
    typer.echo(output)
