"""What the trainer does while candidates still decode: their log-probs, and the rewards of complete groups."""

from .rewards import decode_completions
from .streams import Streams, make_streams


__all__ = ["Streams", "decode_completions", "make_streams"]
