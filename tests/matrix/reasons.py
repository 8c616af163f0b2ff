"""Why a type is not batched, not in 8 bits, or not there at all, in words for people."""

NO_METAL = "its code needs a Metal kernel, and this machine has none"
OWN_ATTENTION = "it computes attention itself, over one array of keys for all rows"
SPARSE_INDEX = "its sparse attention writes an index into the cache object itself"
ONE_POSITION = "it makes one mask for all rows from one position"

LATENT_8 = "8-bit KV: it reads its latent KV outside of the attention function"
PLAIN_8 = "8-bit KV: it works on keys or values as arrays outside of the attention function"


def both(batch: str, kv8: str) -> str:
    """A reason for each of the two columns."""
    return f"{batch}; {kv8}"


REASONS = {
    "afm7": both("layers that share KV take the position from one array of keys", PLAIN_8),
    "bitnet": NO_METAL,
    "deepseek_v32": both(SPARSE_INDEX, PLAIN_8),
    "deepseek_v41": "it takes the position of all rows from one cache of a class of its own",
    "gemma2": both(OWN_ATTENTION, PLAIN_8),
    "glm_moe_dsa": both(SPARSE_INDEX, PLAIN_8),
    "gpt_bigcode": "it gives all rows the position of one",
    "gpt_oss": "8-bit KV: MLX has no quantized attention with sinks",
    "llama4": ONE_POSITION,
    "minimax_m3_vl": both("its sparse attention cuts blocks out of one array of keys", PLAIN_8),
    "muse_spark": NO_METAL,
    "olmo": "mlx-lm imports the package ai2-olmo for it",
    "phi3small": both(OWN_ATTENTION, PLAIN_8),
    "plamo": both("it repeats keys as one array for all rows", PLAIN_8),
    "plamo2": both(OWN_ATTENTION, PLAIN_8),
    **dict.fromkeys(("phi", "phixtral", "stablelm"), PLAIN_8),
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "bailing_moe_v3",
            "deepseek_v3",
            "deepseek_v3, 4-bit weights",
            "glm4_moe_lite",
            "kimi_k25",
            "kimi_k3",
            "kimi_linear",
            "kimi_vl",
            "longcat_flash",
            "longcat_flash_ngram",
            "mistral3, mistral4 inside",
            "mistral4",
        ),
        LATENT_8,
    ),
}
