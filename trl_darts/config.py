"""`DARTSGRPOConfig`: TRL's `GRPOConfig` and the fields that shape rollouts."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from .engines.deadlines import Deadlines
from .field_checks import check_fields
from .policy import LatencyCurve
from .scheduling import ScheduleSettings


API_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own name


@dataclass
class DARTSGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`DARTSGRPOTrainer`].

    This class includes only the parameters that it adds to [`~trl.GRPOConfig`]. For the others, see there. The symbols
    in brackets are those of [DARTS](https://huggingface.co/papers/2605.30859).

    Parameters:
        > Parameters that decide how many candidates are sampled

        schedule (`str`, *optional*, defaults to `"darts"`):
            Which system decides about rollouts, see `docs/schedules.md`. `"darts"` samples up to
            `max_num_generations` candidates per prompt and keeps the shortest and the longest complete ones; `"grpo"`
            samples and keeps `num_generations`, as TRL does; `"tail_batching"` defers the slowest prompts to rounds of
            their own; `"partial_rollout"` goes on with unfinished candidates in the next step; `"sorted"` takes
            several batches at once and trains on those first that finish first.
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
        long_end_patience (`float` or `"auto"`, *optional*):
            Bound on the wait for the long end: once a prompt has `num_generations` complete candidates, those that
            reach this many times the `num_generations`-th shortest complete length are aborted. At least 1. With
            `"auto"` they go on as long as another prompt is still short of `num_generations`, and no longer. `None`
            waits for all, as the paper does.
        selection (`str`, *optional*):
            What is kept of a prompt's candidates: `"dual_end"`, the shortest and the longest complete ones;
            `"uniform"`, those that came to an end, whatever their length; `"all"`, where no more are sampled than are
            kept. Defaults to `"dual_end"` with `schedule="darts"` and to `"all"` otherwise. Tail batching, partial
            rollouts and sorted batches can be combined with any.
        fill_bubbles (`bool`, *optional*, defaults to `False`):
            Whether candidates beyond `num_generations` are not sampled from the beginning, but added during a rollout
            where engines have room, to the prompts whose lengths spread most. Needs `latency_curve` and
            `long_end_patience`.

        > Parameters that decide which prompts go into a batch

        prompt_oversampling (`float`, *optional*):
            Prompts that are started for each that is trained on, with `schedule="tail_batching"` (defaults to 1.25)
            and `"partial_rollout"` (defaults to 2).
        max_partial_age (`int`, *optional*):
            Steps after which an unfinished prompt of `schedule="partial_rollout"` must come to its end. Defaults to 4.
        mask_stale_after (`int`, *optional*):
            Tokens that were sampled by a policy more than this many weight syncs old have no weight in the loss. Only
            with schedules that keep tokens. `None` trains on all, with TRL's importance sampling correction.
        sorted_group_batches (`int`, *optional*):
            Batches of prompts that enter together with `schedule="sorted"`. Defaults to 4.
        sorted_mode (`str`, *optional*):
            What becomes of unfinished prompts with `schedule="sorted"`: `"on_policy"` begins them anew, `"partial"`
            goes on with their tokens, `"post_hoc"` brings all batches to their end first. Defaults to `"on_policy"`.
        sorted_grouped (`bool`, *optional*):
            Whether `schedule="sorted"` takes no new prompts until all are used. Defaults to `True`.
        sorted_order (`str`, *optional*):
            Which complete prompts `schedule="sorted"` trains on first: `"shortest"`, `"longest"` or `"arrival"`.
            Defaults to `"shortest"`.

        > Parameters that decide where candidates run

        length_ranked (`bool`, *optional*):
            Whether candidates are submitted in the order of their expected lengths, longest first. Defaults to `True`
            but for `schedule="grpo"`.
        num_long_servers (`int`, *optional*, defaults to `0`):
            How many of several vLLM servers take nothing but the candidates that are expected to be longest.
        long_share (`float`, *optional*, defaults to `0.1`):
            Share of candidates that those servers are for.

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

    schedule: str = field(
        default="darts",
        metadata={
            "help": "Which system decides about rollouts: 'darts', 'grpo' (as TRL), 'tail_batching', "
            "'partial_rollout' or 'sorted'. See docs/schedules.md."
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
    # In this order, `str` is what a command line's value is: `HfArgumentParser` takes the type in the middle.
    long_end_patience: float | str | None = field(
        default=None,
        metadata={
            "help": "Once a prompt has `num_generations` complete candidates, those that reach this many times the "
            "`num_generations`-th shortest complete length are aborted; with 'auto', all once no prompt is short of "
            "them. `None` waits for all, as the paper does."
        },
    )
    selection: str | None = field(
        default=None,
        metadata={
            "help": "What is kept of a prompt's candidates: 'dual_end', 'uniform' or 'all'. Defaults to 'dual_end' "
            "with `schedule='darts'`, to 'all' otherwise."
        },
    )
    fill_bubbles: bool = field(
        default=False,
        metadata={
            "help": "Whether further candidates are added during a rollout where engines have room, instead of at "
            "its beginning. Needs `latency_curve` and `long_end_patience`."
        },
    )
    prompt_oversampling: float | None = field(
        default=None,
        metadata={
            "help": "Prompts started for each that is trained on, with 'tail_batching' (1.25) and 'partial_rollout' "
            "(2)."
        },
    )
    max_partial_age: int | None = field(
        default=None,
        metadata={"help": "Steps after which an unfinished prompt of 'partial_rollout' must come to its end (4)."},
    )
    mask_stale_after: int | None = field(
        default=None,
        metadata={"help": "Tokens of a policy more than this many weight syncs old have no weight in the loss."},
    )
    sorted_group_batches: int | None = field(
        default=None, metadata={"help": "Batches of prompts that enter together with 'sorted' (4)."}
    )
    sorted_mode: str | None = field(
        default=None,
        metadata={
            "help": "What becomes of unfinished prompts with 'sorted': 'on_policy' (begin anew), 'partial' (go on) or "
            "'post_hoc' (all are finished first)."
        },
    )
    sorted_grouped: bool | None = field(
        default=None, metadata={"help": "Whether 'sorted' takes no new prompts until all are used (true)."}
    )
    sorted_order: str | None = field(
        default=None,
        metadata={"help": "Which complete prompts 'sorted' trains on first: 'shortest', 'longest' or 'arrival'."},
    )
    length_ranked: bool | None = field(
        default=None,
        metadata={"help": "Whether the candidates expected to be longest are submitted first. False with 'grpo'."},
    )
    num_long_servers: int = field(
        default=0,
        metadata={"help": "Servers that take nothing but the candidates expected to be longest."},
    )
    long_share: float = field(default=0.1, metadata={"help": "Share of candidates that those servers are for."})
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

    def __str__(self) -> str:
        words = super().__str__()
        return words.replace(f"vllm_api_key={self.vllm_api_key},", f"vllm_api_key=<{API_KEY_VARIABLE}>,")

    def load_latency_curve(self) -> LatencyCurve | None:
        """The curve that `latency_curve` names; [`ConfigurationError`] if the file is missing or malformed."""
        return None if self.latency_curve is None else LatencyCurve.load(self.latency_curve)
