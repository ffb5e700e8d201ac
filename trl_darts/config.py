"""`DARTSGRPOConfig`: TRL's `GRPOConfig` and the fields that shape rollouts."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from .errors import ConfigurationError
from .policy import LatencyCurve
from .scheduling import SCHEDULES, SchedulePolicies, make_policies
from .weights import WEIGHT_SYNCS


# M_total is about 1.5·N·M on average in the paper (Appendix B).
DEFAULT_REDUNDANCY = 1.5


@dataclass
class DARTSGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`DARTSGRPOTrainer`].

    This class includes only the parameters that it adds to [`~trl.GRPOConfig`]. For the others, see there. The symbols
    in brackets are those of [DARTS](https://huggingface.co/papers/2605.30859).

    Parameters:
        > Parameters that decide how many candidates are sampled

        schedule (`str`, *optional*, defaults to `"darts"`):
            Which system decides about rollouts. `"darts"` samples up to `max_num_generations` candidates per prompt
            and keeps the shortest and the longest complete ones; `"grpo"` samples and keeps `num_generations`, as TRL
            does.
        max_num_generations (`int`, *optional*):
            Most candidates of one prompt [M_up]. Defaults to twice `num_generations`.
        target_redundancy (`float`, *optional*):
            Candidates per row trained on, on average over a batch, that the budget is calibrated to [M_total / (N·M)].
            Between 1 and `max_num_generations / num_generations`. Defaults to 1.5, or to the upper end where that is
            less.
        redundancy_cost_weight (`float`, *optional*):
            Weight of rollout time against variety in the budget [λ]. A larger one makes the budget smaller. `None`
            calibrates it during the first steps so that the budget meets `target_redundancy`, and then holds it.
        length_ema (`float`, *optional*, defaults to `0.5`):
            Weight of the newest observation in the moving averages of response lengths.
        latency_curve (`str`, *optional*):
            Path of a JSON file with the engine's latency per token, see [`LatencyCurve`]. With it, the cost of a
            candidate is computed, and budgets are the same on every run; without it, the cost is estimated from the
            seconds that rollouts took.

        > Parameters that decide what is waited for and kept

        num_longest (`int`, *optional*, defaults to `1`):
            How many of a prompt's `num_generations` rows are its longest complete candidates [L]. The others are its
            shortest ones.
        tail_pruning (`bool`, *optional*, defaults to `True`):
            Whether a prompt that was given `max_num_generations` candidates stops at its `num_generations`-th complete
            one, keeps those and aborts the rest.
        long_end_patience (`float`, *optional*):
            Bound on the wait for the long end: once a prompt has `num_generations` complete candidates, those that
            reach this many times the `num_generations`-th shortest complete length are aborted. At least 1. `None`
            waits for all, as the paper does.

        > Parameters that control generation with vLLM servers

        vllm_request_timeout_s (`float`, *optional*, defaults to `3600.0`):
            Deadline of one candidate in seconds, its wait for a free slot on the server included.
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

    schedule: str = field(
        default="darts",
        metadata={
            "help": "Which system decides about rollouts: 'darts' samples up to `max_num_generations` candidates per "
            "prompt and keeps the shortest and the longest complete ones; 'grpo' samples and keeps `num_generations`."
        },
    )
    max_num_generations: int | None = field(
        default=None,
        metadata={"help": "Most candidates of one prompt (M_up). Defaults to twice `num_generations`."},
    )
    target_redundancy: float | None = field(
        default=None,
        metadata={
            "help": "Candidates per row trained on, on average over a batch, that the budget is calibrated to. "
            "Between 1 and `max_num_generations / num_generations`. Defaults to 1.5, or to the upper end where that "
            "is less."
        },
    )
    redundancy_cost_weight: float | None = field(
        default=None,
        metadata={
            "help": "Weight of rollout time against variety in the budget (lambda). `None` calibrates it during the "
            "first steps so that the budget meets `target_redundancy`, and then holds it."
        },
    )
    length_ema: float = field(
        default=0.5,
        metadata={"help": "Weight of the newest observation in the moving averages of response lengths."},
    )
    latency_curve: str | None = field(
        default=None,
        metadata={
            "help": "Path of a JSON file with the engine's latency per token. Without it, the cost of a candidate is "
            "estimated from the seconds that rollouts took."
        },
    )
    num_longest: int = field(
        default=1,
        metadata={
            "help": "How many of a prompt's `num_generations` rows are its longest complete candidates (L). The "
            "others are its shortest ones."
        },
    )
    tail_pruning: bool = field(
        default=True,
        metadata={
            "help": "Whether a prompt with `max_num_generations` candidates stops at its `num_generations`-th "
            "complete one, keeps those and aborts the rest."
        },
    )
    long_end_patience: float | None = field(
        default=None,
        metadata={
            "help": "Once a prompt has `num_generations` complete candidates, those that reach this many times the "
            "`num_generations`-th shortest complete length are aborted. `None` waits for all, as the paper does."
        },
    )
    vllm_request_timeout_s: float = field(
        default=3600.0,
        metadata={"help": "Deadline of one candidate in seconds, its wait for a free slot on the server included."},
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
        if self.max_num_generations is None:
            self.max_num_generations = 2 * self.num_generations
        self._check_selection()
        self._check_budget()
        self._check_servers()

    @property
    def policies(self) -> SchedulePolicies:
        """The policy objects that these settings stand for."""
        return make_policies(
            self.schedule,
            num_generations=self.num_generations,
            max_num_generations=self.max_num_generations,
            num_longest=self.num_longest,
            tail_pruning=self.tail_pruning,
            long_end_patience=self.long_end_patience,
        )

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
        return 1.0 if self.schedule == "grpo" else self.max_num_generations / self.num_generations

    def load_latency_curve(self) -> LatencyCurve | None:
        """The curve that `latency_curve` names; [`ConfigurationError`] if the file is missing or malformed."""
        return None if self.latency_curve is None else LatencyCurve.load(self.latency_curve)

    def _check_selection(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"`schedule` ({self.schedule!r}) must be one of {', '.join(map(repr, SCHEDULES))}."
            )
        if self.max_num_generations < self.num_generations:
            raise ConfigurationError(
                f"`max_num_generations` ({self.max_num_generations}) must be at least `num_generations` "
                f"({self.num_generations}). Raise it, or leave it unset for 2 × `num_generations`."
            )
        if not 0 <= self.num_longest < self.num_generations:
            raise ConfigurationError(
                f"`num_longest` ({self.num_longest}) must be at least 0 and less than `num_generations` "
                f"({self.num_generations}): the other rows are the shortest ones. The paper uses 1."
            )
        if self.long_end_patience is not None and not self.long_end_patience >= 1:
            raise ConfigurationError(
                f"`long_end_patience` ({self.long_end_patience}) must be at least 1, in multiples of the "
                "`num_generations`-th shortest complete length. Leave it unset to wait for all candidates."
            )

    def _check_budget(self) -> None:
        highest = self.max_num_generations / self.num_generations
        if self.target_redundancy is None:
            self.target_redundancy = min(DEFAULT_REDUNDANCY, highest)
        if not 1 <= self.target_redundancy <= highest:
            raise ConfigurationError(
                f"`target_redundancy` ({self.target_redundancy}) must be between 1 and `max_num_generations` / "
                f"`num_generations` ({highest:g}). Lower it, or raise `max_num_generations`."
            )
        if self.redundancy_cost_weight is not None and not 0 < self.redundancy_cost_weight < math.inf:
            raise ConfigurationError(
                f"`redundancy_cost_weight` ({self.redundancy_cost_weight}) must be positive. Leave it unset to have "
                "it calibrated."
            )
        if not 0 < self.length_ema <= 1:
            raise ConfigurationError(
                f"`length_ema` ({self.length_ema}) must be greater than 0 and at most 1, the weight of the newest "
                "observation."
            )
        self.load_latency_curve()

    def _check_servers(self) -> None:
        if not self.vllm_request_timeout_s > 0:
            raise ConfigurationError(
                f"`vllm_request_timeout_s` ({self.vllm_request_timeout_s}) must be positive, in seconds."
            )
        if self.weight_sync not in WEIGHT_SYNCS:
            raise ConfigurationError(
                f"`weight_sync` ({self.weight_sync!r}) must be one of {', '.join(map(repr, WEIGHT_SYNCS))}."
            )
        if self.weight_sync_dir is not None and self.weight_sync != "filesystem":
            raise ConfigurationError(
                f"`weight_sync_dir` ({self.weight_sync_dir!r}) is only used with `weight_sync='filesystem'`, not "
                f"{self.weight_sync!r}. Set that, or leave it unset."
            )
        on_servers = self.use_vllm and self.vllm_mode == "server"
        if on_servers and not self.server_urls:
            raise ConfigurationError(f"`vllm_server_base_url` ({self.vllm_server_base_url!r}) names no server.")
        if on_servers and len(set(self.server_urls)) < len(self.server_urls):
            raise ConfigurationError(
                f"`vllm_server_base_url` ({self.vllm_server_base_url!r}) names a server twice. Each address once."
            )
        if (self.generation_kwargs or {}).get("n", 1) != 1:
            raise ConfigurationError(
                f"`generation_kwargs['n']` ({self.generation_kwargs['n']}) must be left out. The number of "
                "completions per prompt is `num_generations`, and of candidates `max_num_generations`."
            )
        self._check_engine()

    def _check_engine(self) -> None:
        if self.schedule == "grpo" or self.use_vllm:
            return
        remedies = {
            "stop_strings": "Leave it out, or set `schedule='grpo'`, or use vLLM with `stop`.",
            "eos_token_id": "Set it in the `generation_config` of the model, or set `schedule='grpo'`.",
        }
        for name, remedy in remedies.items():
            if value := (self.generation_kwargs or {}).get(name):
                raise ConfigurationError(
                    f"`generation_kwargs[{name!r}]` ({value!r}) does not run with `schedule` ({self.schedule!r}) on "
                    "the transformers engines: a completion is complete at an end-of-sequence token of the model. "
                    f"{remedy}"
                )
