"""`ServerFields`: the settings of vLLM servers."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ConfigurationError
from ..policy import EngineTimes, LatencyProfile, TailTimes
from ..scheduling import ScheduleSettings, TailServers
from ..scheduling.rules import POSITIVE, Conflict, one_of, setting
from ..weights import WEIGHT_SYNCS
from .addresses import API_KEY_VARIABLE, check_address, split_addresses
from .server_list import check_source
from .waiting import Deadlines


ADDRESSES = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
TURN_SECONDS = 5.5  # to put one engine to sleep and wake the other on the same GPUs (PAT, Section 5.4)


@dataclass
class ServerFields(ScheduleSettings):
    """Base class of [`DARTSGRPOConfig`]. Its checks read fields of the whole config."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """TRL's fields."""

    vllm_server_list: str | None = setting(
        None,
        "List of the vLLM servers, instead of `vllm_server_base_url`: a file that `trl-darts serve --output` writes, "
        "a directory with one such file per command, or 'ray:NAME' for the servers of `trl-darts serve --on ray "
        "--name NAME`. It is followed during the run: servers that are added join, also in the middle of a rollout.",
    )
    vllm_tail_server_url: str | None = setting(
        None,
        "Addresses, separated by commas, of vLLM servers with another layout, such as one with more GPUs beside "
        "several with fewer. They take over the last candidates of a rollout, see `tail_switch_at`.",
    )
    vllm_tail_shares_gpus: bool = setting(
        False,
        "Whether `vllm_tail_server_url` is on the GPUs of the main servers: each kind sleeps while the other decodes. "
        "All servers need `--enable-sleep-mode`.",
    )
    vllm_request_timeout_s: Annotated[float, POSITIVE] = setting(
        Deadlines.request_s,
        "Seconds without a token after which a candidate's request is an error, also in the queue of a server that "
        "decodes others. A request whose tokens arrive goes on.",
    )
    vllm_connect_timeout_s: Annotated[float, POSITIVE] = setting(
        Deadlines.connect_s, "Deadline for connecting to a server, in seconds."
    )
    vllm_first_token_timeout_s: Annotated[float, POSITIVE] = setting(
        Deadlines.first_token_s,
        "Seconds to wait for a first token. A server that sends none at all is taken out, and its candidates continue "
        "on others. A candidate that gets none while its server decodes others, and is not queued there, is retried "
        "on another server.",
    )
    vllm_token_timeout_s: Annotated[float, POSITIVE] = setting(
        Deadlines.token_s,
        "Seconds to wait for the next token, after the first. A preempted candidate counts as queued.",
    )
    vllm_health_timeout_s: Annotated[float, POSITIVE] = setting(
        Deadlines.health_s,
        "Seconds for which a server may leave its health check unanswered. This is how a frozen server is found.",
    )
    vllm_rollout_timeout_s: Annotated[float, POSITIVE] = setting(
        Deadlines.rollout_s,
        "Deadline of a whole rollout in seconds. TRL's `vllm_server_timeout` is how long it waits for a server when "
        "all are lost.",
    )
    on_generation_error: Annotated[str, one_of(("raise", "drop_group"))] = setting(
        "raise",
        "What to do when a prompt can't be completed, because a server rejects it or a deadline passes. 'raise' ends "
        "the run with an error that names the prompt, the server and the server's message. 'drop_group' continues "
        "without the prompt: the rows of another one are repeated in its place with zero loss weight, and "
        "`darts/rollout/dropped_groups` counts it. Only with vLLM servers.",
    )
    weight_sync: Annotated[str, one_of(WEIGHT_SYNCS)] = setting(
        "auto",
        "How weights reach the servers: 'nccl' (TRL's way, CUDA), 'filesystem' (through files; the "
        "servers need `trl_darts` installed), 'adapter' (a LoRA adapter alone, without a pause; the servers need "
        "`--lora-rank`), or 'auto': the adapter where the model is plain LoRA and all servers can, otherwise NCCL on "
        "CUDA, files elsewhere.",
    )
    weight_sync_dir: str | None = setting(
        None,
        "Directory that the trainer and the servers share, where weights go through files. Defaults to a new one on "
        "this machine, in shared memory if it has room.",
    )
    compare_weights: bool = setting(
        True,
        "Whether to compare the servers' log-probs with the trainer's own after the first weight sync, every 50th, "
        "and after a server has joined. A difference that rounding does not explain ends the run. Only with vLLM "
        "servers.",
    )

    def _check_addresses(self) -> None:
        if not self.uses_servers:
            return
        if self.vllm_server_list is not None:
            check_source(self.vllm_server_list)
        for name, urls in (("vllm_server_base_url", self.server_urls), ("vllm_tail_server_url", self.tail_urls)):
            value = getattr(self, name)
            if value is not None and not urls and not (value == "" and self.vllm_server_list is not None):
                raise ConfigurationError(f"`{name}` ({value!r}) names no server. Name one, or leave it unset.")
            for url in urls:
                check_address("vllm_server_host" if value is None else name, url)
            if len(set(urls)) < len(urls):
                raise ConfigurationError(f"`{name}` ({value!r}) names a server twice. Name each address once.")

    @property
    def uses_servers(self) -> bool:
        """Whether vLLM servers generate."""
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of the vLLM servers, empty with a `vllm_server_list`."""
        if self.vllm_server_list is not None:
            return []
        if self.vllm_server_base_url is None:
            return [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return split_addresses(self.vllm_server_base_url)

    @property
    def tail_urls(self) -> list[str]:
        """Base URLs of the tail servers."""
        return split_addresses(self.vllm_tail_server_url or "")

    @property
    def predicts_switch(self) -> bool:
        """Whether tail servers take over when that is predicted to pay, from expected lengths."""
        return bool(self.tail_urls) and self.tail_switch_at is None

    @property
    def reads_lengths(self) -> bool:
        return super().reads_lengths or self.predicts_switch

    @property
    def api_key(self) -> str | None:
        """
        The servers' key, from the environment. It is not a field, because a config is saved with the run. Without it,
        clients look for the key of each server on this machine, see `keys`.
        """
        return os.environ.get(API_KEY_VARIABLE) or None

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of requests to servers."""
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
        Returns the properties of the tail servers, `None` without any.

        Raises:
            [`ConfigurationError`]: If the switch is predicted and `latency_curve` has no profile of the tail servers.
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


# fmt: off
# What settings of servers can't be combined with. Rows have two lines, which is why they are not formatted.
SERVER_CONFLICTS = (
    Conflict(" ".join(dict.fromkeys((*ADDRESSES, *ServerFields.__annotations__))), lambda s: not s.uses_servers,
             "would not be used: with {use_vllm} and {vllm_mode} no server generates",
             "Set `use_vllm=True` and `vllm_mode='server'`, or leave it out."),
    Conflict("weight_sync_dir", lambda s: s.weight_sync == "nccl", "has no effect with {weight_sync}"),
    Conflict("vllm_server_list", lambda s: s.vllm_server_base_url, "replaces {vllm_server_base_url}",
             "Leave one of them out, or set the addresses of a recipe to '' on the command line."),
    Conflict("vllm_server_list", lambda s: s.vllm_tail_shares_gpus,
             "does not run with {vllm_tail_shares_gpus}: a server that joins has GPUs of its own"),
    # Tail servers
    Conflict("tail_switch_at tail_share vllm_tail_shares_gpus", lambda s: not s.tail_urls,
             "has no effect without `vllm_tail_server_url`, the servers that take over", "Set it, or leave both out."),
    Conflict("tail_share", lambda s: s.vllm_tail_shares_gpus,
             "needs tail servers that decode from the start, but with {vllm_tail_shares_gpus} they sleep then"),
    Conflict("vllm_tail_server_url", lambda s: not set(s.tail_urls).isdisjoint(s.server_urls),
             "must name other servers than {vllm_server_base_url}"),
    Conflict("vllm_tail_server_url", lambda s: s.tail_switch_at == 0 and not s.tail_share,
             "would not be used with {tail_switch_at}, which is never, and {tail_share}"),
    Conflict("vllm_tail_server_url", lambda s: s.predicts_switch and s.latency_curve is None,
             "takes over when that is predicted to pay, and needs `latency_curve`, a profile of both kinds of servers",
             "Measure it with `trl-darts profile`, or set `tail_switch_at` to a number of unfinished candidates."),
    Conflict("vllm_tail_server_url", lambda s: s.is_continuous,
             "does not run with {rollout_ahead}, whose rollout has no tail"),
)
# fmt: on
