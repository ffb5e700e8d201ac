"""The fields of the config that shape rollouts; what they mean is up to [`ScheduleSettings`]."""

from dataclasses import dataclass, field


@dataclass
class ScheduleArguments:
    r"""
    Arguments that decide what is sampled, what is waited for and what is kept. The symbols in brackets are those of
    [DARTS](https://huggingface.co/papers/2605.30859).

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
        long_end_patience (`float`, `"auto"` or `None`, *optional*, defaults to `"auto"`):
            Bound on the wait for the long end. With `"auto"`, a prompt that has `num_generations` complete candidates
            goes on as long as another prompt is still short of them, and no longer. A number, at least 1, aborts those
            that reach this many times the `num_generations`-th shortest complete length. `None` (`none` on a command
            line), the paper's rule, waits for the whole pool of every prompt that `tail_pruning` does not stop.
        selection (`str`, *optional*):
            What is kept of a prompt's candidates: `"dual_end"`, the shortest and the longest complete ones;
            `"uniform"`, those that came to an end, whatever their length; `"all"`, where no more are sampled than are
            kept. Defaults to `"dual_end"` with `schedule="darts"` and to `"all"` otherwise. Tail batching, partial
            rollouts and sorted batches can be combined with any.
        fill_bubbles (`bool`, *optional*, defaults to `False`):
            Whether candidates beyond `num_generations` are not sampled from the beginning, but added during a rollout
            where engines have room, to the prompts whose lengths spread most. Needs `latency_curve`, and a
            `long_end_patience` that is not `None`.

        > Parameters that decide which prompts go into a batch

        prompt_oversampling (`float`, *optional*):
            Prompts that are started for each that is trained on, with `schedule="tail_batching"` (defaults to 1.25)
            and `"partial_rollout"` (defaults to 2).
        max_partial_age (`int`, *optional*):
            Rollouts that may end without a prompt of `schedule="partial_rollout"` once it is in flight; the next one
            waits for it. Defaults to 4.
        mask_stale_after (`int`, *optional*):
            Tokens that were sampled by a policy more than this many optimizer steps old have no weight in the loss.
            Only with schedules that keep tokens. `None` trains on all, with TRL's importance sampling correction.
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
        default="auto",
        metadata={
            "help": "How long a prompt with `num_generations` complete candidates goes on. 'auto': until no prompt is "
            "short of them. A number: candidates that reach this many times the `num_generations`-th shortest "
            "complete length are aborted. 'none': until the whole pool is complete, but for prompts that "
            "`tail_pruning` stops, as in the paper."
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
            "its beginning. Needs `latency_curve`, and a bounded `long_end_patience`."
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
        metadata={"help": "Rollouts that may end without a prompt of 'partial_rollout' that is in flight (4)."},
    )
    mask_stale_after: int | None = field(
        default=None,
        metadata={"help": "Tokens of a policy more than this many optimizer steps old have no weight in the loss."},
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
