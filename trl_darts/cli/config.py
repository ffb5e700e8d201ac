"""`trl-darts config`: checks recipes before they run, publishes them, and fetches published ones."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigurationError, TRLDARTSError
from ..recipes.files import check_hub, read_yaml, shipped_file
from .exits import USAGE_ERROR, announce_loading, fail


app = typer.Typer(no_args_is_help=True, help="Check a config, publish it on the Hub, or fetch a published one.")

# torch and TRL take seconds to load and are imported in the commands, so that `--help` is fast.


@app.command()
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="YAML files, or names of recipes in the package.")
    ],
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of training processes. Default: the accelerate config's, the recipe's, or 1."
        ),
    ] = None,
    accelerate_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Config file of `accelerate launch --config_file`.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts in the data set, if the recipe has no `num_prompts`.")
    ] = None,
    max_prompt_length: Annotated[int, typer.Option(min=0, help="Tokens of the longest prompt in the data set.")] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Value of `trl-darts serve --max-model-len`.")
    ] = None,
) -> None:
    """
    Check recipes: fields, batch arithmetic, lengths, and errors that the trainer would raise.

    No model is loaded, and no GPU is needed. Exits with code 2 if a run would fail.

    Example:

        trl-darts config check tiny_reasoner --num-processes 2
    """
    launch = {} if accelerate_config is None else _read_launch(accelerate_config)
    num_processes = num_processes or launch.get("num_processes")
    has_failed = False
    for path in files:  # continues after a failure
        try:
            path = Path(shipped_file("file", str(path)))
            read_yaml(path)  # a missing file is reported without loading TRL
            announce_loading()
            from ..recipes.recipe import check_lengths, read_recipe

            recipe = read_recipe(path, num_processes)
            check_lengths(recipe, max_prompt_length, max_model_len)
            rows = recipe.rows(num_prompts)
        except TRLDARTSError as error:
            where = f"{path}: "
            message = str(error).removeprefix(where).removeprefix(f"`file` ({str(path)!r}) ")
            typer.echo(f"Error: {where}{message}", err=True)
            has_failed = True
            continue
        typer.echo("\n".join([f"{path}: ok", *(f"{name:<18}{value}" for name, value in rows.items()), ""]))
        for warning in recipe.warnings(is_fsdp=launch.get("distributed_type") == "FSDP"):
            typer.echo(f"Warning: {path}: {warning}", err=True)
    if has_failed:
        raise typer.Exit(USAGE_ERROR)


def _read_launch(path: Path) -> dict[str, Any]:
    launch = read_yaml(path)
    count = launch.get("num_processes")
    is_count = count is None or (type(count) is int and count > 0)
    if not is_count or {"distributed_type", "num_processes"}.isdisjoint(launch):
        raise ConfigurationError(
            f"`--accelerate-config` ({str(path)!r}) must be a file of `accelerate config`, with a `distributed_type` "
            f"and a positive `num_processes` ({count!r}). Correct it, or leave it out."
        )
    return launch


@app.command()
def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file for `--config` of the training script.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Repository, org/name. Created if missing.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository, and reject an existing public one.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to commit to, created if missing. By default main.", metavar="BRANCH")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="A field of the file to leave out. Repeat it for several.", metavar="FIELD"),
    ] = None,
    measured: Annotated[
        str | None, typer.Option(help="Measured effect, for the card: hardware, data, figures.", metavar="TEXT")
    ] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.", metavar="TEXT")] = "Upload config",
) -> None:
    """
    Publish a config on the Hub, with a card.

    Secrets, paths, addresses, accounts and fields that load code are never published; docs/recipes.md has the list.
    The token is that of `hf auth login`, or `HF_TOKEN`.

    Example:

        trl-darts config push configs/tiny_reasoner.yaml me/tiny --without model_name_or_path --without reward_funcs
    """
    read_yaml(file)
    check_hub(repo_id)
    announce_loading()
    from ..recipes.hub import push_config
    from ..recipes.recipe import read_fields

    pushed = push_config(
        read_fields(file),
        repo_id,
        without=without or (),
        private=private or None,  # `None` uses the organization's default
        revision=revision,
        commit_message=message,
        measured=measured,
    )
    if pushed.left_out:
        typer.echo(f"Left out, to be set where the run is started: {', '.join(pushed.left_out)}", err=True)
    typer.echo(f"{repo_id}@{pushed.commit}")


@app.command()
def pull(
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID[@REVISION]", help="Repository, with an optional branch, tag or commit.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="YAML file to write. It must not exist yet.", metavar="FILE")
    ] = Path("darts_config.yaml"),
) -> None:
    """
    Fetch a published config, check it, and write it to a file for `--config` of the training script.

    A config with an unknown field, or with a path, an address, an account or code, is rejected.

    Example:

        trl-darts config pull org/name@main --output config.yaml
    """
    name, _, revision = repo_id.removeprefix("hf://").partition("@")
    check_hub(name, revision or None, cached=True)
    announce_loading()
    from ..recipes.hub import pull_config
    from ..recipes.recipe import read_fields

    pulled = pull_config(repo_id)
    read_fields(pulled.path)
    try:
        with output.open("xb") as file:
            file.write(pulled.path.read_bytes())
    except FileExistsError:
        fail(f"`output` ({str(output)!r}) must be a new file, and exists. Choose another.")
    typer.echo(f"From {pulled.address}", err=True)
    typer.echo(output)


@app.command()
def schema(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: print the schema.", metavar="FILE"),
    ] = None,
) -> None:
    """
    Write the JSON schema of recipes, with which an editor completes fields and shows their help.

    The recipes in `configs` name it in their first line: `# yaml-language-server: $schema=recipe.schema.json`.

    Example:

        trl-darts config schema --output configs/recipe.schema.json
    """
    from ..recipes.schema import recipe_schema

    text = json.dumps(recipe_schema(), indent=1, ensure_ascii=False)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
