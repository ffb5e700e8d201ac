"""
`DARTSGRPOConfig`: TRL's `GRPOConfig`, the settings of rollouts, and the Hub.
"""

from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig  # type: ignore[attr-defined]

from .hub import PublishedConfig
from .scheduling import ScheduleSettings
from .scheduling.setting import unmarked
from .settings import RolloutSettings


BATCH_ERROR = "must be divisible by num_generations"  # of TRL, which does not say where the batch is from


@dataclass
class DARTSGRPOConfig(RolloutSettings, PublishedConfig, GRPOConfig):  # type: ignore[misc]  # TRL's may be `None`
    r"""
    Configuration class for the [`DARTSGRPOTrainer`].

    It adds fields to [`~trl.GRPOConfig`]: those of [`ScheduleSettings`], which shape rollouts, and of
    [`RolloutSettings`]. Each field's help says what it means. [`PublishedConfig`] takes a config from the Hub, and
    publishes it.
    `vllm_server_base_url` may name several servers, separated by commas; the key of servers that ask for one is read
    from the environment's `VLLM_API_KEY`.

    A default that depends on other fields, such as `max_num_generations`, is filled in when the config is made.
    `dataclasses.replace` computes it again for the new fields. TRL's own are handed on as if they had been set.

    Raises:
        [`ConfigurationError`]: If a field can't work. Names it, its value, the rule and a remedy.
    """

    def __post_init__(self) -> None:
        self.forget_filled_in()  # before the Hub's part looks at what is set
        self.check_types()
        self.check_group()
        try:
            super(ScheduleSettings, self).__post_init__()  # TRL's, which fills in what is read below
        except ValueError as error:
            if BATCH_ERROR not in str(error):
                raise
        self.check_batch(self.world_size)  # instead of TRL's error, not on top of it
        self.check()

    def to_dict(self) -> dict[str, Any]:
        """All fields with their values, also those that were filled in: to a config made of it, they were all set."""
        return {name: unmarked(value) for name, value in super().to_dict().items()}
