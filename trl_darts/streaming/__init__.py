"""Computes log-probs of candidates and rewards of complete groups while other candidates still decode."""

from .rewards import decode_completions
from .streams import Streams, make_streams


__all__ = ["Streams", "decode_completions", "make_streams"]
