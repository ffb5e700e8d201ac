"""
An Idefics3 with its processor, made on the spot, for vLLM inside the trainer's process: what it says depends on the
image.

vLLM's own class of it does without torchvision, which those of the models in `tests/trl_parity/vlms.py` need.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase
from transformers.models import idefics3
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from benchmarks.models import EOS_ID
from benchmarks.tool_calls import make_chat_tokenizer
from tests.trl_parity.vlms import IMAGE_SIZE
from tests.zoo import HIDDEN_SIZE, random_model, save, set_odds, text_options


PATCH_SIZE = 2
MERGED_PATCHES = 2  # along each side, into one token
IMAGE_TOKEN = "<image>"
SPECIAL_TOKENS = (IMAGE_TOKEN, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")

# A comment in this class's file names torchvision's, so transformers 5.17 exports a class that refuses to work without
# torchvision. `AutoProcessor`, and with it vLLM in this process, finds the real one once it is put here.
idefics3.Idefics3ImageProcessorPil = Idefics3ImageProcessorPil


def make_idefics3(out_dir: Path) -> Path:
    """
    Writes a random Idefics3 that ends after about six tokens, with its processor, which scales images to a square and
    does not split them.
    """
    tokenizer = make_chat_tokenizer(image=IMAGE_TOKEN)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    config = _config(tokenizer)
    model = random_model(config.architectures[0], config, seed=0)
    set_odds(model, tokenizer, {EOS_ID: 1 / 6})
    return save(out_dir, model, _processor(tokenizer))


def _config(tokenizer: PreTrainedTokenizerBase) -> transformers.Idefics3Config:
    vision = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "initializer_range": 0.2,
    }
    return transformers.Idefics3Config(
        architectures=["Idefics3ForConditionalGeneration"],
        text_config={"model_type": "llama", **text_options("llama")},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=MERGED_PATCHES,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def _processor(tokenizer: PreTrainedTokenizerBase) -> transformers.Idefics3Processor:
    edge = {"longest_edge": IMAGE_SIZE}
    return transformers.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False),
        tokenizer=tokenizer,
        image_seq_len=(IMAGE_SIZE // PATCH_SIZE // MERGED_PATCHES) ** 2,
        chat_template=tokenizer.chat_template,
    )
