"""Evaluates the demo model on unseen words and phrases."""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training.example import Draw
from mlxstack.demo.training.scoring import TRIALS, ScoredTask
from mlxstack.demo.training.tokenize import prompt_and_answer

MAX_TOKENS = 160
PREFILL_TOKENS = 512
Report = dict[str, dict[str, float | int | str]]


class Speaker:
    """The loaded model, answering prompts greedily in single precision."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = load(str(folder))[:2]
        self.model.set_dtype(mx.float32)

    def answer(self, prompt: str) -> str:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False)
        cache: Any = make_prompt_cache(self.model)
        for start in range(0, len(tokens), PREFILL_TOKENS):
            logits = self.model(mx.array([tokens[start : start + PREFILL_TOKENS]]), cache=cache)
            mx.eval(logits)
        answer_tokens: list[int] = []
        while len(answer_tokens) < MAX_TOKENS:
            token = int(logits[0, -1].argmax().item())
            if token in self.tokenizer.eos_token_ids:
                break
            answer_tokens.append(token)
            logits = self.model(mx.array([[token]]), cache=cache)
        return str(self.tokenizer.decode(answer_tokens))


def judge(speaker: Speaker, trial: ScoredTask, seed: int, n_cases: int, is_loud: bool) -> int:
    """Count the correct ones of `n_cases`."""
    n_right = 0
    draw = Draw(random.Random(f"{trial.name}/{seed}"), held_out=True)
    for _ in range(n_cases):
        case = trial.make(draw)
        prompt, expected = prompt_and_answer(case)
        answer = speaker.answer(prompt)
        is_right = trial.judge(case, answer)
        n_right += is_right
        if is_loud and not is_right:
            asked = str(case.messages[-2]["content"])[-120:]
            print(f"  {trial.name}: {asked!r}\n    {answer!r}\n    not {expected!r}")
    return n_right


def evaluate(folder: Path, seed: int, n_cases: int | None, is_loud: bool) -> Report:
    """Every trial with `n_cases` cases, or with its own number."""
    speaker = Speaker(folder)
    report: Report = {}
    for trial in TRIALS:
        count = n_cases or trial.n_cases
        n_right = judge(speaker, trial, seed, count, is_loud)
        share = round(n_right / count, 4)
        report[trial.name] = {
            "about": trial.about,
            "cases": count,
            "right": n_right,
            "share": share,
            "target": trial.target,
        }
        print(
            f"{trial.name:15} {n_right:4}/{count:<4} {share:7.1%} of {trial.target:.0%}", flush=True
        )
    return report


def missed(report: Report) -> list[str]:
    return [name for name, row in report.items() if float(row["share"]) < float(row["target"])]


def page(report: Report, seed: int) -> str:
    lines = [
        "# How good the demo model is",
        "",
        "Written by `python -m mlxstack.demo.training.evaluate --write` "
        f"(seed {seed}, greedy decoding).",
        "The words, names, places and phrases of these cases were kept from training.",
        "",
        "| trial | what | right | share | target |",
        "|---|---|---|---|---|",
    ]
    for name, row in report.items():
        counts = f"{row['right']} of {row['cases']}"
        target = "none yet"
        if row["target"]:
            target = f"{float(row['target']):.0%}"
        lines.append(
            f"| {name} | {row['about']} | {counts} | {float(row['share']):.1%} | {target} |"
        )
    return "\n".join(lines) + "\n"


def write(report: Report, folder: Path, seed: int) -> None:
    text = json.dumps({"seed": seed, "trials": report}, indent=2) + "\n"
    (folder / "evaluation.json").write_text(text)
    (folder / "EVALUATION.md").write_text(page(report, seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, help="cases per trial (each trial's own number)")
    parser.add_argument("--write", action="store_true", help="write the report into the folder")
    parser.add_argument("--loud", action="store_true", help="show what went wrong")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    report = evaluate(options.folder, options.seed, options.cases, options.loud)
    if options.write:
        write(report, options.folder, options.seed)
    return 1 if missed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
