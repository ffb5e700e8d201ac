"""Checks of config files that don't need TRL, which takes seconds to load: their YAML, and access to the Hub."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..engines.addresses import check_address
from ..errors import ConfigurationError, HubError, did_you_mean


CONFIG_NAME = "darts_config.yaml"
SHIPPED = Path(__file__).parents[1] / "configs"  # a link to `configs` of the repository
TIMEOUT_S = 2.0  # the Hub's client retries for half a minute


class _Loader(yaml.SafeLoader):
    """Refuses a name that is given twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge" and key.value in names:
                raise yaml.MarkedYAMLError(problem="a name is given twice", problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def shipped_file(option: str, name: str, directory: Path = SHIPPED) -> str:
    """Returns the YAML file of this name in the package, or the path of a file as it is."""
    path = Path(name)
    if path.exists() or path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or "://" in name:
        return name
    names = sorted(found.stem for found in directory.glob("*.yaml"))
    if name not in names:
        raise ConfigurationError(
            f"`{option}` ({name!r}) must be a YAML file, or one of those that come with trl_darts: "
            f"{', '.join(names)}.{did_you_mean(name, names)}"
        )
    return str(directory / f"{name}.yaml")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file. Errors name the line but don't quote it, because it may hold a secret."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"`file` ({str(path)!r}) must be a file that can be read: {reason}. Correct its path."
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", "it is nested too deeply") + (f" in line {mark.line + 1}" if mark else "")
        raise ConfigurationError(f"`file` ({str(path)!r}) must be plain YAML: {problem}. Correct it there.") from error
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigurationError(f"`file` ({str(path)!r}) must be a YAML mapping of names to values.")
    return data


def lines_of(path: str | Path) -> dict[str, int]:
    """Returns the line of each name of a YAML file that [`read_yaml`] can read."""
    node = yaml.compose(Path(path).read_text(encoding="utf-8"), _Loader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: key.start_mark.line + 1 for key, _ in pairs}


def split_command_line(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Splits arguments into those other than `--config FILE`, and the file. It may have a shipped recipe's name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigurationError("`--config` must be followed by a YAML file. Add it, or leave both out.") from error
    return others, None if found.config is None else shipped_file("--config", found.config)


def check_config_option(words: Sequence[str]) -> None:
    """Raises for `--config` without a file, and for a file that is missing or not a mapping."""
    _, path = split_command_line(words)
    if path is not None and "://" not in path:
        read_yaml(path)


def check_hub(repo_id: str, revision: str | None = None, cached: bool = False) -> None:
    """Raises [`HubError`] if the Hub can't be reached. With `cached`, a config in the cache suffices."""
    if endpoint := os.environ.get("HF_ENDPOINT"):  # importing the Hub's client fails if it is malformed
        check_address("HF_ENDPOINT", endpoint)
    from huggingface_hub import constants, get_session, try_to_load_from_cache  # not needed for `--help`
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
        if cached and isinstance(try_to_load_from_cache(repo_id, CONFIG_NAME, revision=revision), str):
            return
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except HFValidationError as error:
        raise ConfigurationError(f"`repo_id` ({repo_id!r}) must be a name on the Hub such as 'org/name'.") from error
    except (HTTPError, OSError) as error:
        raise HubError(f"`repo_id` ({repo_id!r}) can't be looked up: {unreachable(error)}") from error


def unreachable(error: Exception) -> str:
    """Returns a message with a remedy for an error of the connection to the Hub."""
    from huggingface_hub import constants

    reason = " ".join(str(error).split()).rstrip(".")
    return f"{constants.ENDPOINT} can't be reached ({reason}). Check the network, `HF_ENDPOINT` and `HF_HUB_OFFLINE`."
