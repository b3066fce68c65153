"""Accept rules on the default pair's own chains: each keeps what the theory says it keeps, and no less than a weaker one."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from modeling_domino import loop_domino
from modeling_domino.benchmark.prompts import load_prompts
from modeling_domino.benchmark.summary import bootstrap
from modeling_domino.verification_domino import accept_block


def expected_accepted(draft_ids: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> dict[str, float]:
    """How many drafts of a sampled chain each rule keeps on average over its own coins.

    Args:
        draft_ids: `[n]`.
        q: the law of each draft, `[n, V]`.
        p: the target's law after the anchor and after each draft, `[n + 1, V]`.
    """
    keep, match, weight, thresholds = 1.0, 1.0, 1.0, []
    expected = {"match": 0.0, "speculative": 0.0, "block": 0.0}
    for i, token in enumerate(draft_ids.tolist()):
        ratio = (p[i, token] / q[i, token]).item()
        match *= p[i, token].item()
        keep *= min(1.0, ratio)
        expected["match"] += match
        expected["speculative"] += keep
        weight = min(1.0, weight * ratio)
        if i + 1 < len(draft_ids):
            mass = (weight * p[i + 1] - q[i + 1]).clamp(min=0).sum().item()
            thresholds.append(mass / max(mass + 1 - weight, 1e-12))
        else:
            thresholds.append(weight)
    for i in range(len(thresholds)):
        # Draft i is kept unless every coin from it on fails.
        expected["block"] += 1 - math.prod(1 - threshold for threshold in thresholds[i:])
    return expected


@pytest.mark.slow
def test_rules_on_the_same_sampled_chains(smollm2, monkeypatch, capsys):
    """One JSON line: what each rule keeps of the default drafter's chains at temperature 1, with paired intervals.

    `python -m pytest -m slow tests/test_rules_default.py`
    """
    target, tokenizer, drafter = smollm2
    rounds: list[tuple] = []

    def record(draft_ids, draft_logits, target_logits):
        laws = draft_logits[0].double().softmax(-1), target_logits[0].double().softmax(-1)
        rounds.append((draft_ids[0], *laws))
        return accept_block(draft_ids, draft_logits, target_logits)

    monkeypatch.setitem(loop_domino.SAMPLED_DRAFTS, "block", record)
    kept: dict[str, list[list[dict]]] = {}
    for task in ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench"):
        for prompt_of_task in load_prompts(task, "dev", max_samples=4):
            chat = [{"role": "user", "content": prompt_of_task.turns[0]}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            torch.manual_seed(0)
            rounds.clear()
            options = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 64, "temperature": 1.0}
            drafter.spec_generate(target, inputs["input_ids"], **options)
            kept.setdefault(task, []).append([expected_accepted(*each) for each in rounds])
    report: dict[str, object] = {"rounds": sum(len(chains) for texts in kept.values() for chains in texts)}
    # Texts are resampled within their task: tokens kept by one rule, rounds, tokens kept by the other.
    for better, worse in (("speculative", "match"), ("block", "speculative")):
        strata = [
            [(sum(c[better] for c in text), len(text), sum(c[worse] for c in text)) for text in texts]
            for texts in kept.values()
        ]
        sums = [[sum(column) for column in zip(*units)] for units in strata]
        for i, rule in ((0, better), (2, worse)):
            report[rule] = round(statistics.fmean(each[i] / each[1] for each in sums), 4)
        difference = bootstrap(strata, lambda each: (each[0] - each[2]) / each[1])
        report[f"{better} - {worse}"] = [round(value, 4) for value in difference]
        assert difference[0] >= 0
    with capsys.disabled():
        print("\n" + json.dumps(report))
