"""
Loads `length_history`: the response lengths of an earlier run, for a new run.

Prompts are identified by hashes of their tokens, so a history requires the same tokenizer. Models are compared by
their sizes, because a checkpoint can have any name.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..engines.connection import model_config
from ..errors import ConfigurationError, StateMismatchError
from ..policy import LengthTracker
from ..scheduling import GroupSummary, UniformAdmission, prompt_key
from .run_log import read_log
from .traces import read_traces


LENGTHS_FILE = "darts_lengths.npz"
PROBE = "Ünïcode, 1234567890 + x² = \\frac{1}{2}: the quick brown fox; def f(x):\n    return x\n"


def length_source(config: Any, processing_class: Any) -> str:
    """Describes a model and its tokenizer by a text that is equal for all of their checkpoints."""
    text = config.get_text_config()
    sizes = "×".join(str(getattr(text, name, "?")) for name in ("num_hidden_layers", "hidden_size"))
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokens = tokenizer.encode(PROBE, add_special_tokens=False)
    return f"{text.model_type} {sizes}, tokenizer {prompt_key(tokens):016x}"


def load_history(args: Any, model: Any, processing_class: Any = None) -> LengthTracker:
    """
    Loads the lengths in `args.length_history`: a tracker's file, a checkpoint with one, or a run with traces. Does not
    load the model. Raises [`ConfigurationError`] if they are missing, or of another format, model or tokenizer.
    """
    path = Path(args.length_history)
    try:
        source = length_source(model_config(args, model), processing_class or _tokenizer(args, model))
        tracker: LengthTracker = args.tracker(args.max_completion_length, source)
        if (path / LENGTHS_FILE).exists():
            path = path / LENGTHS_FILE
        if path.is_dir():
            _replay(path, tracker)
        else:
            tracker.load(path)
    except (ConfigurationError, StateMismatchError) as error:
        raise ConfigurationError(f"`length_history` ({args.length_history!r}) can't be used: {error}") from error
    return tracker


def _tokenizer(args: Any, model: Any) -> Any:
    """Loads the same tokenizer as TRL."""
    name = model if isinstance(model, str) else model.config._name_or_path
    revision = (args.model_init_kwargs or {}).get("revision", "main")
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def _replay(directory: Path, tracker: LengthTracker) -> None:
    """Updates a tracker from a run's traces, as it was updated during the run."""
    traces, _ = read_traces(directory)
    if traces.empty:
        raise ConfigurationError(
            f"the directory has neither {LENGTHS_FILE} nor rollouts/rollout_*.parquet. Use a checkpoint, or the "
            "`output_dir` of a run with `save_rollout_trace=True`."
        )
    tracker.check_source(read_log(directory)[0].get("source", ""))
    admission = UniformAdmission(1, tracker)
    ended = traces[~traces["carried_over"]]  # carried-over candidates appear again with all their tokens
    for _, rollout in ended.groupby(["step", "micro"]):
        admission.observe(
            [
                GroupSummary(
                    group_id=int(group),
                    prompt_key=int(rows["prompt_key"].iloc[0]),
                    lengths=rows["length"].tolist(),
                    finish_reasons=rows["finish_reason"].tolist(),
                    selected=[],
                    num_prompt_tokens=int(rows["num_prompt_tokens"].iloc[0]),
                )
                for group, rows in rollout.groupby("group")
            ]
        )
