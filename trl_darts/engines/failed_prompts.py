"""
Prompts that failed on servers. If several fail on a server that decodes no others, it is the cause, else they are.
"""

from collections.abc import Collection


MAX_FAILED_PROMPTS, FAILURES_S = 3, 60.0  # so many, within this time


class FailedPrompts:
    """Groups whose requests have failed, by server."""

    def __init__(self) -> None:
        self._failed_at: dict[str, dict[int, float]] = {}  # by server and group, since the server's last token
        self._suspects: set[int] = set()  # groups that failed on a server that decoded others

    def note(self, url: str, group_id: int, now: float) -> float | None:
        """
        Notes a failure. Returns the time since which too many prompts have failed, if too many have. The server is the
        cause unless requests run on it that it had before.
        """
        failed_at = self._failed_at.setdefault(url, {})
        failed_at[group_id] = now
        recent = [at for group, at in failed_at.items() if now - at < FAILURES_S and group not in self._suspects]
        return min(recent) if len(recent) >= MAX_FAILED_PROMPTS else None

    def suspect(self, url: str) -> None:
        """Suspects the prompts that failed on a server, because it decodes others."""
        self._suspects.update(self._failed_at.pop(url, ()))

    def forget_server(self, url: str) -> None:
        """Forgets what failed on a server that is lost."""
        self._failed_at.pop(url, None)

    def forget(self, group_ids: Collection[int]) -> None:
        """Forgets groups that were taken."""
        self._suspects.difference_update(group_ids)
