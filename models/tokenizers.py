"""Byte-level BPE tokenizers for the built-in models, with the chat templates of their families."""

from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

_VOCABULARY: Final = 768
_MULTIPLE: Final = 64

_QWEN_SPECIAL: Final = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_LLAVA_SPECIAL: Final = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]

_QWEN_CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA_CHAT: Final = (
    "<s>{% for message in messages %}"
    "{% if message['role'] == 'user' %}USER: {% elif message['role'] == 'assistant' %}ASSISTANT: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<image>\n"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def qwen(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Tokenizer with the special tokens and the chat format of Qwen2-VL and Qwen3-VL."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(corpus, _QWEN_SPECIAL),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_QWEN_SPECIAL,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _QWEN_CHAT
    return fast


def llava(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Tokenizer with the special tokens and the USER/ASSISTANT format of LLaVA 1.5."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(corpus, _LLAVA_SPECIAL),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _LLAVA_CHAT
    return fast


def padded_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows of the embedding matrix: the vocabulary rounded up to a multiple of 64."""
    return -(-len(tokenizer) // _MULTIPLE) * _MULTIPLE


def _byte_level_bpe(corpus: Iterable[str], special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(corpus) * 10, trainer)
    return tokenizer
