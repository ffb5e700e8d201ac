"""What configs on the Hub are called: `org/name`, or `org/name@revision`, with or without `hf://`."""

from __future__ import annotations

from ..errors import ConfigurationError


SCHEME = "hf://"


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """
    Repository and revision of a name.

    Args:
        name (`str`):
            `org/name` or `org/name@revision`.
        revision (`str`, *optional*):
            What was said of the revision beside the name.

    Returns:
        `tuple[str, str | None]`: `org/name`, and the revision, `None` if there is none in either place.

    Raises:
        [`ConfigurationError`]: If there is nothing before or after the `@`, or a revision in both places.
    """
    repo_id, at, own = name.removeprefix(SCHEME).partition("@")
    if not repo_id or (at and not own):
        raise ConfigurationError(f"`repo_id` ({name!r}) must be of the form org/name or org/name@revision.")
    if own and revision is not None:
        raise ConfigurationError(
            f"`revision` ({revision!r}) must be left out where the name has one, and that is {name!r}. Say it once."
        )
    return repo_id, own or revision
