"""
`DARTSGRPOConfig`: TRL's `GRPOConfig`, the settings of rollouts, and the Hub.
"""

from dataclasses import dataclass

from trl import GRPOConfig  # type: ignore[attr-defined]

from .hub import PublishedConfig
from .scheduling import ScheduleSettings
from .settings import RolloutSettings


@dataclass
class DARTSGRPOConfig(RolloutSettings, PublishedConfig, GRPOConfig):  # type: ignore[misc]  # TRL's may be `None`
    r"""
    Configuration class for the [`DARTSGRPOTrainer`].

    It adds fields to [`~trl.GRPOConfig`]: those of [`ScheduleSettings`], which shape rollouts, and of
    [`RolloutSettings`]. Each field's help says what it means. [`PublishedConfig`] takes a config from the Hub, and
    publishes it.
    `vllm_server_base_url` may name several servers, separated by commas; the key of servers that ask for one is read
    from the environment's `VLLM_API_KEY`.

    Raises:
        [`ConfigurationError`]: If a field can't work. Names it, its value, the rule and a remedy.
    """

    def __post_init__(self) -> None:
        self.check_group()
        try:
            super(ScheduleSettings, self).__post_init__()  # TRL's, which fills in what is read below
        except ValueError:
            self.check_batch(self.world_size)
            raise
        self.check()
