"""
Vision-language models with their processors, made on the spot and without torchvision: what they say depends on the
image.

A vLLM server loads the LLaVA with `--model-impl transformers` (vLLM's own LLaVA needs torchvision) and says the same
as transformers; it does not load the others without torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageColumn
from PIL import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from benchmarks.models import EOS_ID
from benchmarks.tool_calls import RESPONSE_TEMPLATE
from tests.zoo import (
    HIDDEN_SIZE,
    make_chat_tokenizer,
    random_model,
    save,
    set_odds,
    text_options,
    tokenizer_of,
)


IMAGE_SIZE = 16
GEMMA_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def make_vlm(
    out_dir: Path, kind: str = "llava", mean_length: float = 6, words: Sequence[str] = (), seed: int = 0
) -> Path:
    """
    Writes a random vision-language model with its processor.

    `"llava"` has one block of pixels per image; `"gemma3"` too, and `token_type_ids` that say which tokens are images;
    `"qwen2_vl"` has patches of all images in one tensor, and more tokens for larger images. `words` are further tokens
    that come as often as the end does; with any, answers are read for tool calls.
    """
    make_config, make_processor, special, image = {
        "llava": (_llava_config, _llava_processor, ("<image>",), "<image>"),
        "gemma3": (_gemma3_config, _gemma3_processor, GEMMA_TOKENS, GEMMA_TOKENS[0]),
        "qwen2_vl": (_qwen2_vl_config, _qwen2_vl_processor, QWEN_TOKENS, "".join(QWEN_TOKENS[:3])),
    }[kind]
    tokenizer = make_chat_tokenizer(words, image)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if kind == "gemma3":
        names = dict(zip(("boi_token", "image_token", "eoi_token"), special, strict=True))
        tokenizer = tokenizer_of(json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer.chat_template, names)
    if words:
        tokenizer.response_template = RESPONSE_TEMPLATE
    config = make_config(tokenizer)
    model = random_model(config.architectures[0], config, seed)
    if kind == "gemma3":
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # transformers leaves it at zero
            torch.manual_seed(seed)
            model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    frequent = [EOS_ID, *tokenizer.convert_tokens_to_ids(list(words))]
    set_odds(model, tokenizer, dict.fromkeys(frequent, 1 / mean_length))
    return save(out_dir, model, make_processor(tokenizer))


def load_processor(model_dir: Path) -> Any:
    """The processor of a model of [`make_vlm`]. `AutoProcessor` does it for all but Qwen2-VL without torchvision."""
    if json.loads((Path(model_dir) / "config.json").read_text())["model_type"] == "qwen2_vl":
        return ImageQwen2VLProcessor.from_pretrained(model_dir)
    return transformers.AutoProcessor.from_pretrained(model_dir)


def picture(index: int, width: int = IMAGE_SIZE, height: int = IMAGE_SIZE) -> Image.Image:
    """A picture of one colour; sixteen of them differ clearly."""
    return Image.new("RGB", (width, height), (255 * (index & 1), 255 * (index >> 1 & 1), 85 * (index >> 2 & 3)))


def some_images(counts: Sequence[int], num_rows: int = 8) -> Dataset:
    """Conversations with a column `images` of pictures of several sizes, as many as `counts` says in turn."""
    sizes = [(16, 16), (24, 16), (32, 24), (16, 32)]
    rows = []
    for i in range(num_rows):
        images = [picture(2 * i + k, *sizes[(i + k) % 4]) for k in range(counts[i % len(counts)])]
        rows.append({"prompt": [{"role": "user", "content": f"{i % 2} what is it"}], "images": images})
    prompt = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(rows, features=Features({"prompt": prompt, "images": List(ImageColumn())}))


class ImageQwen2VLProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor without its video part, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        _, self.image_token, _, self.video_token = QWEN_TOKENS
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _vision_options(patch_size: int) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": patch_size,
        "initializer_range": 0.2,
    }


def _llava_config(tokenizer: PreTrainedTokenizerBase) -> transformers.LlavaConfig:
    return transformers.LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        text_config={"model_type": "qwen2", **text_options("qwen2")},
        vision_config={"model_type": "clip_vision_model", **_vision_options(patch_size=8)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-1,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def _llava_processor(tokenizer: PreTrainedTokenizerBase) -> transformers.LlavaProcessor:
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=8,
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out again
        vision_feature_select_strategy="default",
        image_token="<image>",
        chat_template=tokenizer.chat_template,
    )


def _gemma3_config(tokenizer: PreTrainedTokenizerBase) -> transformers.Gemma3Config:
    start, image, end = tokenizer.convert_tokens_to_ids(list(GEMMA_TOKENS))
    window = {"sliding_window": 16, "sliding_window_pattern": 2}
    return transformers.Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=text_options("gemma3", head_dim=32, query_pre_attn_scalar=32, **window),
        vision_config=_vision_options(patch_size=4),
        mm_tokens_per_image=4,
        image_token_id=image,
        boi_token_id=start,
        eoi_token_id=end,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def _gemma3_processor(tokenizer: PreTrainedTokenizerBase) -> transformers.Gemma3Processor:
    images = Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    return transformers.Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)


def _qwen2_vl_config(tokenizer: PreTrainedTokenizerBase) -> transformers.Qwen2VLConfig:
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}  # sums to half a head
    vision = {"depth": 2, "embed_dim": HIDDEN_SIZE, "num_heads": 2, "mlp_ratio": 2, "spatial_merge_size": 2}
    return transformers.Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        text_config=text_options("qwen2", rope_parameters=rope),
        vision_config={**vision, "hidden_size": HIDDEN_SIZE, "patch_size": 4, "initializer_range": 0.2},
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=video,
        tie_word_embeddings=False,
    )


def _qwen2_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ImageQwen2VLProcessor:
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=32 * 32)
    return ImageQwen2VLProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
