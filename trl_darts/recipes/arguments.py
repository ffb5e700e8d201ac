"""What `examples/train_grpo.py` takes beside the trainer's and the model's arguments."""

from dataclasses import dataclass, field

from trl.scripts.grpo import GRPOScriptArguments

from ..errors import ConfigurationError


OVERLONG = "get_soft_overlong_punishment"
MADE_DATASET = "tiny_reasoner"  # that of examples/tiny_reasoner, which is made and not loaded


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """
    TRL's arguments of a GRPO script, and what brings a data set and a reward into the form that TRL wants.

    Args:
        num_prompts (`int`, *optional*):
            Prompts of a data set that is made on the spot (`tiny_reasoner`), and only of such a one: 512 by default.
        prompt_column (`str`, *optional*):
            Column with the question. It becomes the user's message of a conversation in the column `prompt`, which
            TRL's math rewards need. `None` leaves the data set as it is.
        solution_column (`str`, *optional*):
            Column with the answer, which becomes the column `solution` that TRL's math rewards read.
        system_prompt (`str`, *optional*):
            First message of each conversation. Only with `prompt_column`.
        soft_punish_cache (`int`, *optional*):
            Tokens before `max_completion_length` in which the reward `get_soft_overlong_punishment` falls from 0 to
            -1 ([DAPO](https://huggingface.co/papers/2503.14476), Eq. 13). Needed with that reward, and only with it.
    """

    num_prompts: int | None = field(
        default=None, metadata={"help": "Prompts of a made data set (`tiny_reasoner`), 512 by default."}
    )
    prompt_column: str | None = field(
        default=None,
        metadata={"help": "Column with the question, which becomes the user's message of a conversation in `prompt`."},
    )
    solution_column: str | None = field(
        default=None, metadata={"help": "Column with the answer, which becomes the column `solution`."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "First message of each conversation. Only with `prompt_column`."}
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Tokens before `max_completion_length` in which the reward `get_soft_overlong_punishment` falls "
            "from 0 to -1."
        },
    )

    def __post_init__(self) -> None:
        if self.ignore_bias_buffers:
            raise ConfigurationError(
                "`ignore_bias_buffers` (True) has no effect: neither TRL's GRPO script nor ours reads it. Drop it."
            )
        self._check_num_prompts()
        if self.system_prompt is not None and self.prompt_column is None:
            raise ConfigurationError(
                f"`system_prompt` ({self.system_prompt!r}) only has an effect with `prompt_column`, from which "
                "conversations are made. Set that, or leave it out."
            )
        punishes = OVERLONG in (self.reward_funcs or [])
        if punishes and self.soft_punish_cache is None:
            raise ConfigurationError(
                f"`reward_funcs` ({OVERLONG!r}) needs `soft_punish_cache`, the tokens before `max_completion_length` "
                "in which it falls from 0 to -1. Set it, for example to a fifth of that."
            )
        if not punishes and self.soft_punish_cache is not None:
            raise ConfigurationError(
                f"`soft_punish_cache` ({self.soft_punish_cache}) only has an effect with the reward {OVERLONG!r}. Add "
                "that to `reward_funcs`, or leave it out."
            )
        if self.soft_punish_cache is not None and self.soft_punish_cache < 1:
            raise ConfigurationError(f"`soft_punish_cache` ({self.soft_punish_cache}) must be at least 1 token.")

    def _check_num_prompts(self) -> None:
        if self.dataset_name == MADE_DATASET and self.num_prompts is None:
            self.num_prompts = 512
        if self.num_prompts is None:
            return
        if self.num_prompts < 1:
            raise ConfigurationError(f"`num_prompts` ({self.num_prompts}) must be at least 1.")
        if self.dataset_name != MADE_DATASET:
            raise ConfigurationError(
                f"`num_prompts` ({self.num_prompts}) only has an effect with `dataset_name` {MADE_DATASET!r}, and "
                f"that is {self.dataset_name!r}. Leave it out, and save or publish the part of the data that you want."
            )
