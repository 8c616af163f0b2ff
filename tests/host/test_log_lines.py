"""Lines of a log as people read them; machines read whole lines."""

import pytest

from mlxstack.host.log_lines import shortened

HEAD = "2026-11-26 09:54:10,589 INFO mlxstack.requests request=req_b2 id=chatcmpl-a1 "


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            HEAD + 'agent="shop api" slot=0 priority=normal prompt=1200 cached=600 generated=12 '
            "queued_ms=7 ttft_ms=470 decode_ms=67 ended=eos miss=-",
            "09:54:10 shop api  1200 tokens, 50% reused, 12 generated, first token 470ms",
        ),
        (
            HEAD + 'agent="a" slot=- priority=low prompt=10 cached=0 generated=0 queued_ms=2500 '
            "ttft_ms=0 decode_ms=0 ended=cancelled miss=new conversation",
            "09:54:10 a  10 tokens, 0% reused, 0 generated, first token 0ms, waited 2.50s, "
            "miss: new conversation, cancelled",
        ),
        ("2026-11-26 09:54:08,032 INFO mlxstack.serve demo is ready", "09:54:08 demo is ready"),
        ("2026-11-26 09:54:08,032 WARNING mlxstack.x odd", "09:54:08 WARNING odd"),
        (HEAD + "of another version", "09:54:10 request=req_b2 id=chatcmpl-a1 of another version"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_a_line_is_shortened(line: str, told: str) -> None:
    assert shortened(line) == told
