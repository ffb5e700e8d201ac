"""
`DARTSGRPOConfig`: TRL's `GRPOConfig`, the settings of rollouts, and the Hub.
"""

from dataclasses import dataclass

from trl import GRPOConfig  # type: ignore[attr-defined]

from .errors import ConfigurationError
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
            self._check_batch()
            raise
        self.check()

    def _check_batch(self) -> None:
        """TRL refuses it too, and names what it has computed of the fields that were set."""
        if self.generation_batch_size and self.generation_batch_size % self.num_generations:
            raise ConfigurationError(
                f"The generation batch ({self.generation_batch_size} rows: `per_device_train_batch_size` "
                f"({self.per_device_train_batch_size}) × {self.world_size} process{'es' * (self.world_size != 1)} × "
                f"`steps_per_generation` ({self.steps_per_generation})) must be divisible by "
                f"`num_generations` ({self.num_generations}). Change one of them."
            )
