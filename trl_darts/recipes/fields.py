"""The fields of recipes: their names, and values of the types that the training script's parser gives them."""

from argparse import Action, ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import NoneType
from typing import Any, NoReturn, cast, get_type_hints

from trl import DatasetMixtureConfig, ModelConfig, TrlParser  # type: ignore[attr-defined]  # exported lazily

from ..config import DARTSGRPOConfig
from ..errors import ConfigurationError, did_you_mean
from ..scheduling.rules import checked_type, kinds_of, one_of
from .other_names import other_name
from .script import ScriptArguments


ARGUMENTS: list[Any] = [ScriptArguments, DARTSGRPOConfig, ModelConfig, DatasetMixtureConfig]  # of the script
OTHER_KINDS: dict[str, tuple[type, ...]] = {  # that PEFT, transformers and TRL take beside those of the annotations
    **dict.fromkeys(("lora_target_modules", "lora_target_parameters"), (str,)),
    **dict.fromkeys(("resume_from_checkpoint", "scale_rewards"), (bool,)),
    "fsdp": (bool, list),
}
QUOTE = " YAML reads an unquoted word such as no as a truth value: quote it."


class Parser(TrlParser):
    """Raises the errors of TRL's parser instead of exiting, and rejects unknown names before configs are built."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(
            f"{message[:1].upper()}{message[1:].rstrip('.')}. Correct it; `--help` lists the arguments."
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = super().parse_known_args(args, namespace)
        for word in others:
            if word.startswith("--"):
                name, _, value = word.removeprefix("--").partition("=")
                raise no_field(name.replace("-", "_"), value)
        return found, others


@cache
def actions() -> dict[str, Action]:
    """Returns the parser's action of each field: that of `--x`, not `--no_x`."""
    return {action.dest: action for action in reversed(TrlParser(ARGUMENTS)._actions) if action.dest != "help"}


@cache
def hints() -> dict[str, Any]:
    """Returns the annotation of each field. `Field.type` can't be used, because building a parser changes it."""
    return {name: hint for cls in ARGUMENTS for name, hint in get_type_hints(cls).items()}


def checked(name: str, value: Any) -> Any:
    """
    Returns a file's value for a field, or raises. As on a command line, text may stand for a number, such as `1e-6`
    in YAML, and a number for text.
    """
    if name not in actions():
        raise no_field(name, value)
    action, kinds = actions()[name], kinds_of(hints()[name]) + OTHER_KINDS.get(name, ())
    kinds += (NoneType,) if action.default is None else ()  # the annotation may be that of the computed value
    convert = cast(Callable[[str], Any], action.type)
    with suppress(ValueError, TypeError, ArgumentTypeError):  # the type of the value is wrong then
        if isinstance(value, list):
            value = [convert(item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, (bool, *kinds))):
            value = convert(str(value))
    try:
        value = checked_type(name, value, kinds)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}{QUOTE if isinstance(value, bool) else ''}") from error
    if action.choices is not None and value is not None:
        one_of(action.choices).check(name, value)
    return value


def no_field(name: str, value: Any = None) -> ConfigurationError:
    """Returns an error for a name that is no field, with what it may stand for."""
    if (meaning := other_name(name, value)) is not None:
        return ConfigurationError(f"`{name}` {meaning}")
    remedy = did_you_mean(name, sorted(actions())) or " Remove it."
    return ConfigurationError(f"`{name}` is not a field of the script, the trainer or the model.{remedy}")
