"""Computes log-probs of candidates and rewards of complete groups while other candidates still decode."""

from .reward_stream import decode_completions
from .streams import Streams, make_streams


__all__ = ["Streams", "decode_completions", "make_streams"]
