"""Response shapes of llama-server: sampling parameters, errors."""

from typing import Any

from mlxstack.core.request import Request, SamplingParams

Answer = dict[str, Any] | list[dict[str, Any]]

RANDOM_SEED = 4294967295

ABSENT: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "chat_format": "Content-only",
    "reasoning_format": "deepseek",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": ("penalties", "top_k", "top_p", "min_p", "temperature"),
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": (),
}

# Only in the answer of a completion.
SPOKEN: dict[str, Any] = {
    "dry_sequence_breakers": (),
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": (),
    "preserved_tokens": (),
}


def params(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """The `params` of /props and /slots. -1 tokens means no limit."""
    return {
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.window,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
        "ignore_eos": False,
        "stream": False,
        "n_probs": sampling.top_logprobs or 0,
        **ABSENT,
    }


def request_params(request: Request) -> dict[str, Any]:
    """The `params` of a slot: those of its last request."""
    return {**params(request.sampling, request.max_tokens), "ignore_eos": not request.eos}


def generation_settings(request: Request, stop: tuple[str, ...], is_stream: bool) -> dict[str, Any]:
    """The `generation_settings` of a completion."""
    return {
        **request_params(request),
        **SPOKEN,
        "stream": is_stream,
        "stop": stop,
        "logit_bias": [
            {"bias": bias, "token": token} for token, bias in request.sampling.logit_bias
        ],
    }
