"""One rollout over many processes: each decodes a share of the candidates, and one of them decides."""

from .agreement import Agreement
from .batch import PromptBatch
from .director import Director, Report, Slot
from .links import DirectLink, FollowingLink, Link, MainLink, RemoteLink
from .mailbox import Mailbox
from .share import Share


__all__ = [
    "Agreement",
    "DirectLink",
    "Director",
    "FollowingLink",
    "Link",
    "Mailbox",
    "MainLink",
    "PromptBatch",
    "RemoteLink",
    "Report",
    "Share",
    "Slot",
]
