"""Lines of a service's log, shortened for people."""

import re

from mlxstack.core.formatting import share, short_time

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d),\d{3} ([A-Z]+) (\S+) (.*)", re.DOTALL)
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
_REQUESTS = "mlxstack.requests"


def shortened(line: str) -> str:
    """A request as one short sentence; other lines without date, module and usual level."""
    found = _STAMP.match(line)
    if found is None:
        return line
    _, clock, level, source, text = found.groups()
    if source == _REQUESTS and (told := _request(text)):
        text = told
    return f"{clock} {text}" if level == "INFO" else f"{clock} {level} {text}"


def _request(text: str) -> str | None:
    fields = {name: value.strip('"') for name, value in _FIELD.findall(text)}
    try:
        n_prompt, n_cached = int(fields["prompt"]), int(fields["cached"])
        wait, first = float(fields["queued_ms"]) / 1000, float(fields["ttft_ms"]) / 1000
        parts = [f"{n_prompt} tokens", f"{share(n_cached, n_prompt)} reused"]
        parts += [f"{fields['generated']} generated", f"first token {short_time(first)}"]
        if wait >= 1:
            parts.append(f"waited {short_time(wait)}")
        if fields["miss"] != "-":
            parts.append(f"miss: {text.partition(' miss=')[2]}")
        if fields["ended"] not in ("eos", "length"):
            parts.append(fields["ended"])
    except (KeyError, ValueError):
        return None
    return f"{fields['agent']}  {', '.join(parts)}"
