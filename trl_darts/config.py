"""`DARTSGRPOConfig`: TRL's `GRPOConfig` and the fields that shape rollouts."""

import os
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from .engines.deadlines import Deadlines
from .field_checks import check_fields
from .hub import PublishedConfig
from .policy import LatencyCurve
from .schedule_arguments import ScheduleArguments
from .scheduling import ScheduleSettings
from .stream_arguments import StreamArguments


API_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own name


@dataclass
class DARTSGRPOConfig(PublishedConfig, ScheduleArguments, StreamArguments, GRPOConfig):
    r"""
    Configuration class for the [`DARTSGRPOTrainer`].

    This class includes only the parameters that it adds to [`~trl.GRPOConfig`], [`ScheduleArguments`], which has those
    that shape rollouts, and [`StreamArguments`], which has those of what is done meanwhile. For the others, see there.
    [`PublishedConfig`] takes one from the Hub, and publishes it.

    Parameters:
        > Parameters that control generation with vLLM servers

        vllm_request_timeout_s (`float`, *optional*, defaults to `3600.0`):
            Deadline of one candidate in seconds, its wait for a free slot on the server included.
        vllm_connect_timeout_s (`float`, *optional*, defaults to `10.0`):
            Seconds until a connection to a server is made.
        vllm_first_token_timeout_s (`float`, *optional*, defaults to `600.0`):
            Seconds until a candidate's first tokens. A server that is later is taken out, and its candidates go on
            elsewhere.
        vllm_token_timeout_s (`float`, *optional*, defaults to `300.0`):
            Seconds between two reports of a candidate that decodes; the same follows.
        vllm_health_timeout_s (`float`, *optional*, defaults to `15.0`):
            Seconds for which a server may leave the question unanswered whether it is well. A frozen one is found so.
        vllm_rollout_timeout_s (`float`, *optional*, defaults to `14400.0`):
            Deadline of a whole rollout in seconds. How long it waits for a server once none is left is TRL's
            `vllm_server_timeout`.
        on_generation_error (`str`, *optional*, defaults to `"raise"`):
            What follows when a prompt can't be completed: a server refuses it, or a deadline passes. `"raise"` ends
            the training with an error that names the prompt, the server and the server's words. `"drop_group"` goes on
            without the prompt: the rows of another one are repeated in its place with zero weight in the loss, and
            `darts/rollout/dropped_groups` counts it. Only with vLLM servers.
        vllm_api_key (`str`, *optional*):
            Key of the servers. Defaults to the environment's `VLLM_API_KEY`, which is the better place: a config is
            saved with the run.
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            How weights reach the servers: `"nccl"` (TRL's way, CUDA), `"gloo"` (without CUDA; the servers need
            `trl_darts` installed), `"filesystem"` (through `weight_sync_dir`, where no process group is possible).
            `"auto"` takes NCCL on CUDA and gloo elsewhere.
        weight_sync_dir (`str`, *optional*):
            Directory that the trainer and the servers share, for `weight_sync="filesystem"`. Defaults to a new
            temporary directory of this machine.

        > Parameters that control logging

        save_rollout_trace (`bool`, *optional*, defaults to `False`):
            Whether to write every rollout's candidates (lengths, ends, what was kept) as Parquet files to
            `output_dir/rollouts`.

    > [!NOTE]
    > `vllm_server_base_url` may name several servers, separated by commas.
    """

    vllm_request_timeout_s: float = field(
        default=3600.0,
        metadata={"help": "Deadline of one candidate in seconds, its wait for a free slot on the server included."},
    )
    vllm_connect_timeout_s: float = field(
        default=10.0, metadata={"help": "Seconds until a connection to a server is made."}
    )
    vllm_first_token_timeout_s: float = field(
        default=600.0,
        metadata={
            "help": "Seconds until a candidate's first tokens. A server that is later is taken out, and its "
            "candidates go on elsewhere."
        },
    )
    vllm_token_timeout_s: float = field(
        default=300.0,
        metadata={"help": "Seconds between two reports of a candidate that decodes; the same follows."},
    )
    vllm_health_timeout_s: float = field(
        default=15.0,
        metadata={"help": "Seconds for which a server may leave the question unanswered whether it is well."},
    )
    vllm_rollout_timeout_s: float = field(
        default=14400.0, metadata={"help": "Deadline of a whole rollout in seconds."}
    )
    on_generation_error: str = field(
        default="raise",
        metadata={
            "help": "What follows when a prompt can't be completed: 'raise' ends the training, 'drop_group' repeats "
            "another prompt's rows in its place with zero weight in the loss. Only with vLLM servers."
        },
    )
    vllm_api_key: str | None = field(
        default=None,
        repr=False,
        metadata={"help": "Key of the servers. Better set as `VLLM_API_KEY` in the environment."},
    )
    weight_sync: str = field(
        default="auto",
        metadata={
            "help": "How weights reach the servers: 'nccl' (CUDA), 'gloo' (without CUDA; the servers need trl_darts), "
            "'filesystem' (through `weight_sync_dir`), or 'auto': NCCL on CUDA, gloo elsewhere."
        },
    )
    weight_sync_dir: str | None = field(
        default=None,
        metadata={"help": "Directory that the trainer and the servers share, for `weight_sync='filesystem'`."},
    )
    save_rollout_trace: bool = field(
        default=False,
        metadata={"help": "Whether to write every rollout's candidates as Parquet files to `output_dir/rollouts`."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.schedule_settings  # fills in defaults, and refuses what can't work
        for setting in fields(settings):
            setattr(self, setting.name, getattr(settings, setting.name))
        settings.refill(self.load_latency_curve())
        check_fields(self)

    @property
    def schedule_settings(self) -> ScheduleSettings:
        """Those of these settings that are the schedule's."""
        return ScheduleSettings.of(self)

    @property
    def uses_servers(self) -> bool:
        """Whether vLLM servers generate, and not an engine in the trainer's own process."""
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def colocates(self) -> bool:
        """Whether vLLM generates in the trainer's own processes, on their GPUs."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of the vLLM servers."""
        if self.vllm_server_base_url is None:
            return [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return [url.strip().rstrip("/") for url in self.vllm_server_base_url.split(",") if url.strip()]

    @property
    def num_engines(self) -> int:
        """Engines that decode a batch together: servers, or groups of processes."""
        if not self.use_vllm:
            return self.world_size
        if self.vllm_mode == "server":
            return len(self.server_urls)
        return self.world_size // self.vllm_tensor_parallel_size

    @property
    def pool_ratio(self) -> float:
        """Candidates per row, at most."""
        return self.max_num_generations / self.num_generations if self.schedule_settings.over_provisions else 1.0

    @property
    def api_key(self) -> str | None:
        """Key of the servers, from the config or the environment."""
        return self.vllm_api_key or os.environ.get(API_KEY_VARIABLE) or None

    @property
    def deadlines(self) -> Deadlines:
        """Of requests to servers."""
        return Deadlines(
            connect_s=self.vllm_connect_timeout_s,
            first_token_s=self.vllm_first_token_timeout_s,
            token_s=self.vllm_token_timeout_s,
            request_s=self.vllm_request_timeout_s,
            rollout_s=self.vllm_rollout_timeout_s,
            health_s=self.vllm_health_timeout_s,
            return_s=self.vllm_server_timeout,
        )

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary, for logs and cards, without the key."""
        return super().to_dict() | ({"vllm_api_key": f"<{API_KEY_VARIABLE}>"} if self.vllm_api_key else {})

    def __getstate__(self) -> dict[str, Any]:
        """Without the key too: transformers pickles its arguments beside each model, and uploads both."""
        return self.__dict__ | {"vllm_api_key": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DARTSGRPOConfig":
        twin = object.__new__(type(self))
        twin.__dict__.update(deepcopy(self.__dict__, memo))  # stays in this process, so with the key
        return twin

    def __str__(self) -> str:
        words = super().__str__()
        return words.replace(f"vllm_api_key={self.vllm_api_key},", f"vllm_api_key=<{API_KEY_VARIABLE}>,")

    def load_latency_curve(self) -> LatencyCurve | None:
        """The curve that `latency_curve` names; [`ConfigurationError`] if the file is missing or malformed."""
        return None if self.latency_curve is None else LatencyCurve.load(self.latency_curve)
