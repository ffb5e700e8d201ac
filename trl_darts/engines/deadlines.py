"""Deadlines of operations on a server. The docs give the reason for each default."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of requests to vLLM servers, in seconds. [`DARTSGRPOConfig`] declares and checks them."""

    connect_s: float = 10.0  # to open a connection
    first_token_s: float = 600.0  # until the first tokens of a server, or of a candidate that is not queued
    token_s: float = 300.0  # between tokens of a server, or of a candidate that is not queued
    request_s: float = 3600.0  # between tokens of a candidate, wherever it waits
    rollout_s: float = 14400.0  # for a rollout
    health_s: float = 15.0  # for a health check, which is repeated every two seconds
    info_s: float = 30.0  # to get a server's configuration, which inspects its machine
    return_s: float = 240.0  # that a rollout without servers waits for one to reconnect
