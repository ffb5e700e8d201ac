"""`trl-darts grpo`: launches the training script with accelerate, as `trl grpo` does."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from ..errors import ConfigurationError
from ..recipes.files import SHIPPED, check_config_option, read_yaml, shipped_file, split_command_line
from .exits import announce_loading, one_line_errors


SCRIPT = "trl_darts.cli.train"
HELP = (
    "Train as a recipe says, a YAML file or the name of one that comes with trl_darts, such as tiny_reasoner. Fields "
    "override the recipe's. Options of `accelerate launch` are passed on, and --accelerate_config takes its file, or "
    "the name of one that comes with trl_darts, such as fsdp2. Of the fields, those that TRL's GRPO script lacks are "
    "below; --help-all shows all."
)
ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def grpo(context: typer.Context) -> None:
    """
    Train with GRPO that does not wait for its slowest rollout, as a recipe and options say.

    Example:

        trl-darts grpo --config tiny_reasoner --max_steps 5
    """
    words = context.args
    if _shows_help(words or ["--help"], "trl-darts grpo"):
        return
    check_config_option(words)  # before the imports below, which take seconds
    announce_loading()
    launch, script = split_words(words)
    _launch([*launch, "--quiet", "-m", SCRIPT, *script])


def run_script() -> None:
    """Trains in this process, as `sys.argv` says: for a script that `accelerate launch` starts."""
    words = sys.argv[1:]
    if _shows_help(words, Path(sys.argv[0]).name):
        return
    with one_line_errors():
        check_config_option(words)
    announce_loading()
    from .train import main

    main()


def _shows_help(words: Sequence[str], program: str) -> bool:
    if {"-h", "--help"} & set(words):
        announce_loading()
        from ..recipes.own_fields import print_own_fields

        print_own_fields(program, HELP)
    elif "--help-all" in words:
        announce_loading()
        from trl import TrlParser  # type: ignore[attr-defined]  # exported lazily

        from ..recipes.fields import ARGUMENTS

        TrlParser(ARGUMENTS, prog=program, description=HELP).print_help()
    else:
        return False
    return True


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    Splits arguments into those of `accelerate launch` and those of the script. As with `trl grpo`, what the script
    does not know is the launcher's. Without a number of processes, a recipe's `num_processes` is taken.
    """
    from ..recipes.recipe import words_of_others

    first = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--num_processes", "--num-processes")
    first.add_argument("--accelerate_config", "--accelerate-config")
    given, words = first.parse_known_args(words)
    fields, path = split_command_line(words)
    others = words_of_others(fields)
    script, left = [], list(others)
    for word in words:
        if left[:1] == [word]:
            del left[0]
        else:
            script.append(word)
    processes = given.num_processes
    if given.accelerate_config is not None:
        name = shipped_file("--accelerate_config", given.accelerate_config, SHIPPED / "accelerate")
        others = ["--config_file", name, *others]
    elif processes is None and path is not None and "://" not in path:
        processes = read_yaml(path).get("num_processes")
    return [*([] if processes is None else ["--num_processes", str(processes)]), *others], script


def _launch(words: Sequence[str]) -> NoReturn:
    """Runs `accelerate launch` in this process, and exits as it does. Failed processes have printed their errors."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..recipes.fields import no_field

    parser = launch_command_parser()
    for word in words[: words.index("-m")]:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in parser._option_string_actions:
            raise no_field(name.removeprefix("--").replace("-", "_"))
    parser.error = _refuse
    arguments = parser.parse_args(words)
    if arguments.training_script != SCRIPT:
        raise ConfigurationError(
            f"`{arguments.training_script}` is no option. Write `--FIELD VALUE`, or leave it out."
        )
    try:
        launch_command(arguments)
    except ChildFailedError:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)  # as after Ctrl-C in a shell
    sys.exit(0)


def _refuse(message: str) -> NoReturn:
    raise ConfigurationError(f"{message[:1].upper()}{message[1:]}. `accelerate launch --help` lists its options.")
