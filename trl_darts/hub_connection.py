"""
Whether the Hub can be reached. Its own client tries for half a minute, and `hub.py` loads TRL first, which takes as
long.
"""

from .errors import HubError


CONFIG_NAME = "darts_config.yaml"
TIMEOUT_S = 2.0


def check_hub(repo_id: str, revision: str | None = None, cached: bool = False) -> None:
    """Raises [`HubError`] where the Hub can't be reached, unless a `cached` config will do and is there."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache  # a command's `--help` needs none
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        if cached and isinstance(try_to_load_from_cache(repo_id, CONFIG_NAME, revision=revision), str):
            return
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except HFValidationError:
        return  # told where it is asked for
    except (HTTPError, OSError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise HubError(
            f"`repo_id` ({repo_id!r}) can't be asked for: {constants.ENDPOINT} can't be reached ({words}). Check the "
            "network, `HF_ENDPOINT` and `HF_HUB_OFFLINE`."
        ) from error
