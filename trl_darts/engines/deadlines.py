"""How long each thing on a server may take. The docs say why each default is what it is."""

from dataclasses import dataclass, fields

from ..errors import ConfigurationError


@dataclass(frozen=True)
class Deadlines:
    """
    Deadlines of requests to vLLM servers, in seconds.

    Args:
        connect_s (`float`, *optional*, defaults to `10.0`):
            Until a connection is made.
        first_token_s (`float`, *optional*, defaults to `600.0`):
            Until a candidate's first tokens, its wait in the server's queue included.
        token_s (`float`, *optional*, defaults to `300.0`):
            Between two reports of a candidate that decodes, preemption by the server included.
        request_s (`float`, *optional*, defaults to `3600.0`):
            For one candidate.
        rollout_s (`float`, *optional*, defaults to `14400.0`):
            For a rollout.
        health_s (`float`, *optional*, defaults to `15.0`):
            Until a server answers that it is well. It is asked every two seconds.
        return_s (`float`, *optional*, defaults to `240.0`):
            For which a rollout waits for a server once none is left.

    Raises:
        [`ConfigurationError`]: If one is not positive.
    """

    connect_s: float = 10.0
    first_token_s: float = 600.0
    token_s: float = 300.0
    request_s: float = 3600.0
    rollout_s: float = 14400.0
    health_s: float = 15.0
    return_s: float = 240.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigurationError(f"`{field.name}` ({getattr(self, field.name)}) must be positive, in seconds.")
