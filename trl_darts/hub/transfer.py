"""To the Hub and back: the only module that talks to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # its client's own: httpx's from 1.0 on, that of requests before
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import ConfigurationError
from .card import config_card
from .errors import HubError
from .files import CARD_NAME, CONFIG_NAME, checksum, dump, publishable, read_published, recorded_checksum
from .names import SCHEME, split_revision
from .values import check_text


@dataclass(frozen=True)
class Pulled:
    """
    A config that was pulled, and checked.

    Args:
        path (`Path`):
            Of the file in the cache.
        repo_id (`str`):
            Repository that it is from.
        commit (`str`):
            The state of that.
        data (`dict[str, Any]`):
            Values by field name.
    """

    path: Path
    repo_id: str
    commit: str
    data: dict[str, Any] = field(repr=False)

    @property
    def address(self) -> str:
        """`hf://org/name@commit`, which names it for good."""
        return f"{SCHEME}{self.repo_id}@{self.commit}"


@dataclass(frozen=True)
class Pushed:
    """
    A config that was pushed.

    Args:
        commit (`str`):
            The state of the repository that it made.
        url (`str`):
            Where to look at it.
        left_out (`list[str]`):
            Fields that were set and stayed here.
    """

    commit: str
    url: str
    left_out: list[str]


@dataclass(frozen=True)
class Publication:
    """The two files of a published config, and the names of the fields that stayed behind."""

    config: str
    card: str
    left_out: list[str]

    @classmethod
    def of(
        cls, name: str, address: str, data: dict[str, Any], measured: str | None, without: Sequence[str] = ()
    ) -> Publication:
        """Of something with that name, which `--config ADDRESS` takes. Refuses what must not leave."""
        if measured is not None:
            check_text("measured", measured)
        public, left_out = publishable(data, without)
        config = dump(public)
        card = config_card(name, address, public, checksum(config.encode()), left_out, measured)
        return cls(config, card, left_out)


def push_config(
    data: dict[str, Any],
    repo_id: str,
    *,
    without: Sequence[str] = (),
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    measured: str | None = None,
) -> Pushed:
    """
    Publishes a config as `darts_config.yaml` with a card, in one commit. See `docs/hub.md` for what never leaves.

    Args:
        data (`dict[str, Any]`):
            Values by field name, of the trainer's, the model's and the script's arguments.
        repo_id (`str`):
            Repository, such as `"org/name"`. It is made if there is none.
        without (`Sequence[str]`, *optional*):
            Fields of `data` to leave out. The card says that they are to be set.
        private (`bool`, *optional*):
            Whether a new repository is private, and one that exists must be. Defaults to the organization's rule.
        revision (`str`, *optional*):
            Branch to commit to, made if there is none. Defaults to `"main"`.
        token (`str` or `bool`, *optional*):
            Of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
        commit_message (`str`, *optional*):
            Defaults to `"Upload config"`.
        measured (`str`, *optional*):
            What the card says of its effect: hardware, data, figures.

    Returns:
        [`Pushed`]: The commit, and which fields were left out.

    Raises:
        [`ConfigurationError`]: If a field is unknown or has a value that must not leave. Nothing was sent then.
        [`HubError`]: If the Hub can't be reached or refuses, if the repository's card is not a config's, or if it is
            public and must not be. No branch is made then.
    """
    for name, text in {"commit_message": commit_message, "revision": revision}.items():
        if text is not None:
            check_text(name, text)
    address = f"{SCHEME}{repo_id}" if revision is None else f"{SCHEME}{repo_id}@{revision}"
    publication = Publication.of(repo_id, address, data, measured, without)
    api = HfApi(token=token)
    with hub_errors(repo_id, revision):
        api.create_repo(repo_id, private=private, exist_ok=True)
        parent = _checked_parent(api, repo_id, private, revision)
        commit = api.create_commit(
            repo_id,
            [
                CommitOperationAdd(CONFIG_NAME, publication.config.encode()),
                CommitOperationAdd(CARD_NAME, publication.card.encode()),
            ],
            commit_message=commit_message or "Upload config",
            revision=revision,
            parent_commit=parent,  # what was checked must still stand there
        )
    return Pushed(commit.oid, commit.commit_url, publication.left_out)


def pull_config(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> Pulled:
    """
    Fetches a config and its card, of one commit, into the Hub's cache, and checks them.

    Args:
        repo_id (`str`):
            Repository, such as `"org/name"`, or with its revision, `"org/name@revision"`.
        revision (`str`, *optional*):
            Branch, tag or commit, if it does not stand there. Only a whole commit hash names the same file for good.
        token (`str` or `bool`, *optional*):
            Of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
        cache_dir (`str` or `Path`, *optional*):
            Defaults to the Hub's cache.

    Returns:
        [`Pulled`]: The file, where it is from and what it says.

    Raises:
        [`ConfigurationError`]: If there is no config, if it is not the one its card was written for, or if it has a
            field that is unknown or must not stand in a published config; or if there are two revisions.
        [`HubError`]: If the Hub can't be reached, or knows no such repository or revision.
    """
    repo_id, revision = split_revision(repo_id, revision)
    with hub_errors(repo_id, revision):
        directory = Path(
            snapshot_download(
                repo_id,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                allow_patterns=[CONFIG_NAME, CARD_NAME],
            )
        )
    source = repo_id if revision is None else f"{repo_id}@{revision}"
    return Pulled(directory / CONFIG_NAME, repo_id, directory.name, read_published(directory, source))


@contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Says in one line what the Hub's client says in several."""
    try:
        yield
    except HubError:
        raise
    except LocalTokenNotFoundError as error:
        raise HubError(
            "`token` (True) needs one that was saved, and there is none. Log in with `hf auth login`, or set "
            "`HF_TOKEN`."
        ) from error
    except HFValidationError as error:
        raise ConfigurationError(f"`repo_id` ({repo_id!r}) must be a name on the Hub such as 'org/name'.") from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"`revision` ({revision!r}) must be a branch, a tag or a commit of {repo_id!r}, which has none of that "
            "name. Leave it out for the newest state."
        ) from error
    except GatedRepoError as error:  # to its client a kind of the next
        raise HubError(
            f"`repo_id` ({repo_id!r}) must be a repository that you may read, and its owner grants that one by one. "
            f"Ask for access on its page, {constants.ENDPOINT}/{repo_id}, and log in with `hf auth login` or set "
            "`HF_TOKEN`."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"`repo_id` ({repo_id!r}) must be a repository of the Hub that you may see, and there is none. Check the "
            "name; for a private one, log in with `hf auth login` or set `HF_TOKEN`."
        ) from error
    except HfHubHTTPError as error:
        raise HubError(_refusal(repo_id, error)) from error
    except (HTTPError, OSError) as error:
        words = " ".join(str(error.__cause__ or error).split())
        raise HubError(
            f"`repo_id` ({repo_id!r}): the Hub can't be reached, and the cache does not have it ({words}). Check the "
            "network, `HF_ENDPOINT` and `HF_HUB_OFFLINE`."
        ) from error


def _refusal(repo_id: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    words = " ".join((error.server_message or str(error)).split())
    if status in (401, 403):
        return (
            f"`token` is refused for {repo_id!r} ({status}: {words}). Log in with `hf auth login` or set `HF_TOKEN`, "
            "with a token that may do this."
        )
    return f"`repo_id` ({repo_id!r}): the Hub answered {status}: {words}. Try again, or see https://status.huggingface.co."


def _checked_parent(api: HfApi, repo_id: str, private: bool | None, branch: str | None) -> str:
    """The commit to add to, at the head of a branch that is made if there is none."""
    is_new = False
    try:
        state = api.repo_info(repo_id, revision=branch)
    except RevisionNotFoundError:
        state, is_new = api.repo_info(repo_id), True
    if private and not state.private:
        raise HubError(
            f"`private` (True) must hold for {repo_id!r}, which exists and is public. Choose another name, or make it "
            "private in its settings."
        )
    head = str(state.sha)
    _check_card(api, repo_id, head)
    if is_new:
        api.create_branch(repo_id, branch=str(branch), revision=head, exist_ok=True)
    return head


def _check_card(api: HfApi, repo_id: str, revision: str) -> None:
    """A model's card must not be lost because someone puts a config beside the model."""
    try:
        card = hf_hub_download(repo_id, CARD_NAME, revision=revision, token=api.token)
    except LocalEntryNotFoundError:  # the Hub could not be asked
        raise
    except EntryNotFoundError:
        return
    if recorded_checksum(Path(card)) is None:
        raise HubError(
            f"`repo_id` ({repo_id!r}) must be a repository of its own: it has a {CARD_NAME} that is not a config's, "
            "and that would be overwritten. Choose another name."
        )
