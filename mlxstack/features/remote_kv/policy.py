"""Remote prefill: choice between a local prefill and KV of peers."""

from enum import StrEnum

from msgspec import Struct

MIN_TOKENS = 512
"""Minimum tokens worth a round trip to a peer."""

STALL_WEIGHT = 2.0
"""Weight of a local prefill second while others decode."""

CLEARLY = 0.8
"""Maximum expected share of the local time to wait for a peer."""

PATIENCE = 1.5
"""Times the expected seconds after which a service is too slow."""

MIN_PATIENCE_S = 2.0


class PrefillSource(StrEnum):
    """Source of a prompt's KV: computed here, cached or computed remotely."""

    LOCAL = "local"
    FETCH = "fetch"
    REMOTE = "remote"


class PrefillFacts(Struct, frozen=True):
    """Prompt of `n_prompt` tokens: `n_here` cached here, `n_there` at a peer.

    Speeds that are 0 are not known. Prefill of the rest takes `local_s` seconds here, beside
    `n_decoding` rows; the peer computes `remote_tps` tokens per second, at once if it
    `is_remote_idle`. A token has `token_bytes`, of which the link carries `link_bps` per second.
    """

    n_prompt: int
    n_here: int
    n_there: int
    local_s: float
    n_decoding: int
    token_bytes: int
    link_bps: float
    remote_tps: float
    is_remote_idle: bool


class PrefillPlan(Struct, frozen=True):
    """`source` of the KV, expected after `expected_s` seconds (0: unknown).

    With `is_race` the prompt is computed here meanwhile, and the first to end wins.
    """

    source: PrefillSource = PrefillSource.LOCAL
    is_race: bool = False
    expected_s: float = 0.0


def choose(facts: PrefillFacts) -> PrefillPlan:
    """The cheapest source of the rest of a prompt.

    A peer alone is waited for only when it is clearly cheaper by measured speeds. A race needs
    an unknown speed, or no decoding request that prefill here would delay.
    """
    n_left = facts.n_prompt - 1 - facts.n_here
    if n_left < MIN_TOKENS:
        return PrefillPlan()
    is_fetchable = facts.n_there - facts.n_here >= MIN_TOKENS
    if not (is_fetchable or facts.is_remote_idle):
        return PrefillPlan()
    estimates = []
    if is_fetchable:
        estimates.append((_fetch_s(facts, n_left), PrefillSource.FETCH))
    if facts.is_remote_idle:
        estimates.append((_remote_s(facts, n_left), PrefillSource.REMOTE))
    known_estimates = [estimate for estimate in estimates if estimate[0]]
    if not known_estimates or not facts.local_s:
        return PrefillPlan(estimates[0][1], is_race=True)
    expected_s, source = min(known_estimates)
    cost_s = facts.local_s
    if facts.n_decoding:
        cost_s *= STALL_WEIGHT
    if expected_s <= CLEARLY * cost_s:
        return PrefillPlan(source, is_race=False, expected_s=expected_s)
    if expected_s <= facts.local_s and not facts.n_decoding:
        return PrefillPlan(source, is_race=True, expected_s=expected_s)
    return PrefillPlan()


def patience_s(plan: PrefillPlan, local_s: float) -> float:
    """Seconds after which to give the peer up and compute here."""
    return max(MIN_PATIENCE_S, PATIENCE * max(plan.expected_s, local_s))


def _fetch_s(facts: PrefillFacts, n_left: int) -> float:
    """Seconds to fetch the cached part and compute the rest; 0: unknown."""
    if not (facts.link_bps and facts.local_s):
        return 0.0
    n_fetched = min(facts.n_there, facts.n_prompt - 1) - facts.n_here
    rest_s = facts.local_s * (n_left - n_fetched) / n_left
    return n_fetched * facts.token_bytes / facts.link_bps + rest_s


def _remote_s(facts: PrefillFacts, n_left: int) -> float:
    """Seconds until the peer's prefill and transfer are complete; 0: unknown."""
    if not (facts.link_bps and facts.remote_tps):
        return 0.0
    n_computed = max(0, facts.n_prompt - 1 - facts.n_there)
    return n_computed / facts.remote_tps + n_left * facts.token_bytes / facts.link_bps
