"""`ServerFields`: the fields for vLLM servers, with their checks and what follows from them."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engines.addresses import API_KEY_VARIABLE, check_address, split_addresses
from .engines.deadlines import Deadlines
from .errors import ConfigurationError
from .policy import EngineTimes, LatencyProfile, TailTimes
from .scheduling import TailServers
from .scheduling.policies import check_choice
from .scheduling.setting import setting
from .weights import WEIGHT_SYNCS


GENERATION_ERRORS = ("raise", "drop_group")
# TRL's defaults: another value was set by someone.
SERVER_DEFAULTS = {"vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000}
TURN_SECONDS = 5.5  # that engines which share GPUs take to sleep and to wake (PAT, Section 5.4)


@dataclass
class ServerFields:
    """Part of [`RolloutSettings`]. TRL's own fields, and those of the schedule, are read where a check needs them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Those of the classes that it is part of."""

    vllm_tail_server_url: str | None = setting(
        None,
        "Addresses of vLLM servers of another layout, such as one with more GPUs beside several with fewer, separated "
        "by commas. They take over what is left of a rollout, see `tail_switch_at`.",
    )
    vllm_tail_shares_gpus: bool = setting(
        False,
        "Whether `vllm_tail_server_url` is on the GPUs of the main servers: each kind sleeps while the other decodes. "
        "All servers need `--enable-sleep-mode`.",
    )
    vllm_request_timeout_s: float = setting(
        Deadlines.request_s, "Deadline of one candidate in seconds, from its submission to a server on."
    )
    vllm_connect_timeout_s: float = setting(Deadlines.connect_s, "Seconds until a connection to a server is made.")
    vllm_first_token_timeout_s: float = setting(
        Deadlines.first_token_s,
        "Seconds without a first token. A server that sends none at all is taken out, and its candidates go on "
        "elsewhere. A candidate that gets none from a server that decodes others, though none is queued there, is "
        "tried elsewhere.",
    )
    vllm_token_timeout_s: float = setting(
        Deadlines.token_s,
        "The same once tokens have come. A preempted candidate counts as queued.",
    )
    vllm_health_timeout_s: float = setting(
        Deadlines.health_s,
        "Seconds for which a server may leave its health check unanswered. A frozen one is found so.",
    )
    vllm_rollout_timeout_s: float = setting(
        Deadlines.rollout_s,
        "Deadline of a whole rollout in seconds. How long it waits for a server once none is left is TRL's "
        "`vllm_server_timeout`.",
    )
    on_generation_error: str = setting(
        "raise",
        "What follows when a prompt can't be completed: a server refuses it, or a deadline passes. 'raise' ends the "
        "training with an error that names the prompt, the server and the server's message. 'drop_group' goes on "
        "without the prompt: the rows of another one are repeated in its place with zero weight in the loss, and "
        "`darts/rollout/dropped_groups` counts it. Only with vLLM servers.",
    )
    weight_sync: str = setting(
        "auto",
        "How weights reach the servers: 'nccl' (TRL's way, CUDA), 'filesystem' (through files; the "
        "servers need `trl_darts` installed), or 'auto': NCCL on CUDA, files elsewhere.",
    )
    weight_sync_dir: str | None = setting(
        None,
        "Directory that the trainer and the servers share, where weights go through files. Defaults to a new one of "
        "this machine, in shared memory where it has room.",
    )

    def _check_servers(self) -> None:
        for name in self.__dataclass_fields__:
            if name.startswith("vllm_") and name.endswith("_timeout_s") and not getattr(self, name) > 0:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be positive, in seconds.")
        check_choice("on_generation_error", self.on_generation_error, GENERATION_ERRORS)
        if self.on_generation_error != "raise" and not self.uses_servers:
            raise ConfigurationError(
                f"`on_generation_error` ({self.on_generation_error!r}) only has an effect with vLLM servers: an "
                "engine in the trainer's own process takes the training along. Leave it out, or set `use_vllm=True` "
                "and `vllm_mode='server'`."
            )
        check_choice("weight_sync", self.weight_sync, WEIGHT_SYNCS)
        if self.weight_sync_dir is not None and self.weight_sync == "nccl":
            raise ConfigurationError(
                f"`weight_sync_dir` ({self.weight_sync_dir!r}) has no effect with `weight_sync` ('nccl'). Set "
                "`weight_sync='filesystem'`, or leave it unset."
            )
        self._check_addresses()
        self._check_tail()

    def _check_addresses(self) -> None:
        if not self.uses_servers:
            self._check_unused_addresses()
            return
        for name, urls in (("vllm_server_base_url", self.server_urls), ("vllm_tail_server_url", self.tail_urls)):
            value = getattr(self, name)
            if value is not None and not urls:
                raise ConfigurationError(f"`{name}` ({value!r}) names no server. Name one, or leave it unset.")
            for url in urls:
                check_address("vllm_server_host" if value is None else name, url)
            if len(set(urls)) < len(urls):
                raise ConfigurationError(f"`{name}` ({value!r}) names a server twice. Each address once.")

    def _check_tail(self) -> None:
        if self.vllm_tail_server_url is None:
            for name, default in (("tail_switch_at", None), ("tail_share", 0), ("vllm_tail_shares_gpus", False)):
                if (value := getattr(self, name)) != default:
                    raise ConfigurationError(
                        f"`{name}` ({value}) has no effect without `vllm_tail_server_url`, which names the servers "
                        "that take over. Set it, or leave both out."
                    )
            return
        given = f"`vllm_tail_server_url` ({self.vllm_tail_server_url!r})"
        if both := [url for url in self.tail_urls if url in self.server_urls]:
            raise ConfigurationError(
                f"{given} must name other servers than `vllm_server_base_url`, and {both[0]!r} is in both. Leave it "
                "out of one of them."
            )
        if self.tail_switch_at == 0 and not self.tail_share:
            raise ConfigurationError(
                f"{given} would not be used with `tail_switch_at` (0), which is never, and `tail_share` (0). Set one "
                "of them, or leave all out."
            )
        if self.tail_share and self.vllm_tail_shares_gpus:
            raise ConfigurationError(
                f"`tail_share` ({self.tail_share}) needs tail servers that decode from the start, and with "
                "`vllm_tail_shares_gpus` (True) they sleep then. Leave one of them out."
            )
        if self.predicts_switch and self.latency_curve is None:
            raise ConfigurationError(
                f"{given} takes over when that is predicted to pay, which needs `latency_curve`, a profile of both "
                "kinds of servers. Measure it with `trl-darts profile`, or set `tail_switch_at` to a number of "
                "unfinished candidates."
            )

    def _check_unused_addresses(self) -> None:
        """A flag that was forgotten would train with another engine, on another machine's time, without a word."""
        missing = [] if self.use_vllm else ["`use_vllm=True`"]
        missing += [] if self.vllm_mode == "server" else ["`vllm_mode='server'`"]
        for name, default in {**SERVER_DEFAULTS, "vllm_tail_server_url": None}.items():
            value = getattr(self, name)
            if value and value != default:
                raise ConfigurationError(
                    f"`{name}` ({value!r}) would not be used: with `use_vllm` ({self.use_vllm}) and `vllm_mode` "
                    f"({self.vllm_mode!r}) no server generates. Set {' and '.join(missing)}, or leave `{name}` out."
                )

    @property
    def uses_servers(self) -> bool:
        """Whether vLLM servers generate, and not an engine in the trainer's own process."""
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of the vLLM servers."""
        if self.vllm_server_base_url is None:
            return [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return split_addresses(self.vllm_server_base_url)

    @property
    def tail_urls(self) -> list[str]:
        """Base URLs of the servers that take over what is left."""
        return split_addresses(self.vllm_tail_server_url or "")

    @property
    def predicts_switch(self) -> bool:
        """Whether tail servers take over when that is predicted to pay, which is what lengths are needed for."""
        return self.vllm_tail_server_url is not None and self.tail_switch_at is None

    @property
    def api_key(self) -> str | None:
        """Key of the servers, from the environment. Not a field: a config is saved with the run."""
        return os.environ.get(API_KEY_VARIABLE) or None

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

    def tail_servers(self) -> TailServers | None:
        """
        What is known of the servers that take over what is left; `None` without any.

        Raises:
            [`ConfigurationError`]: If `latency_curve` has not both kinds of servers, and a switch is to be predicted.
        """
        if not self.tail_urls:
            return None
        times = None
        if self.predicts_switch:
            profile = LatencyProfile.load(self.latency_curve or "", "latency_curve")
            if profile.tail is None:
                raise ConfigurationError(
                    f"`latency_curve` ({self.latency_curve!r}) must be a profile of both kinds of servers, and has "
                    f"none of `vllm_tail_server_url` ({self.vllm_tail_server_url!r}). Add it with `trl-darts profile "
                    f"{self.tail_urls[0]} --tail-of {self.latency_curve}`, or set `tail_switch_at` to a number of "
                    "unfinished candidates."
                )
            seconds = TURN_SECONDS if self.vllm_tail_shares_gpus else 0.0
            times = TailTimes(EngineTimes.of(profile), EngineTimes.of(profile.tail), seconds)
        return TailServers(times, self.max_completion_length, self.vllm_tail_shares_gpus)
