"""What the trainer does while candidates still decode: their log-probs, and the rewards of complete groups."""

from .streams import Streams, make_streams


__all__ = ["Streams", "make_streams"]
