"""Random model with a tokenizer of 512 tokens, of the form that Llama 2 has.

The suite counts tokens of such a vocabulary, and expects `<s>` before a prompt.
"""

import json
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tests import models

NAME = "tinyllama-2"
"""The suite's name for its model: that of the folder, so that the service has one name."""
VOCAB = 512
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write(folder: Path, text: str) -> Path:
    """Write the model, and a tokenizer trained on `text`, into `folder`."""
    config = {**models.LLAMA, "vocab_size": VOCAB, "tie_word_embeddings": False}
    models.write(folder, {**config, "bos_token_id": 1, "eos_token_id": 2})
    weights = mx.load(str(folder / "model.safetensors"))
    # Answers end at the limit that a test sets, and hold no halves of letters.
    weights["lm_head.weight"] *= 2
    weights["lm_head.weight"][: len(SPECIAL) + len(BYTES)] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    tokenizer = json.loads(_tokenizer(text).to_str())
    # Special tokens are not decoded, but those of single bytes are.
    tokenizer["added_tokens"] = [
        added for added in tokenizer["added_tokens"] if added["id"] < len(SPECIAL)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _tokenizer(text: str) -> Tokenizer:
    backend = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=VOCAB, special_tokens=[*SPECIAL, *BYTES], max_token_length=8, show_progress=False
    )
    backend.train_from_iterator(text.split(), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return backend
