"""How long each thing on a server may take, in seconds. The docs say why each default is what it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of requests to vLLM servers, in seconds. [`DARTSGRPOConfig`] has them as fields, and checks them."""

    connect_s: float = 10.0  # until a connection is made
    first_token_s: float = 600.0  # for which a server, or a candidate that is not queued, gives no first tokens
    token_s: float = 300.0  # for which a server, or a candidate that is not queued, gives no tokens after the first
    request_s: float = 3600.0  # for one candidate on a server
    rollout_s: float = 14400.0  # for a rollout
    health_s: float = 15.0  # until a server answers that it is healthy; it is asked every two seconds
    info_s: float = 30.0  # until a server has told its configuration; it looks at its machine for it
    return_s: float = 240.0  # for which a rollout waits for a server once none is left
