"""How long each thing on a server may take, in seconds. The docs say why each default is what it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of requests to vLLM servers, in seconds. [`DARTSGRPOConfig`] has them as fields, and checks them."""

    connect_s: float = 10.0  # until a connection is made
    first_token_s: float = 600.0  # until a candidate's first tokens, its wait in the server's queue included
    token_s: float = 300.0  # between two reports of a candidate that decodes, preemption by the server included
    request_s: float = 3600.0  # for one candidate
    rollout_s: float = 14400.0  # for a rollout
    health_s: float = 15.0  # until a server answers that it is healthy; it is asked every two seconds
    return_s: float = 240.0  # for which a rollout waits for a server once none is left
