#!/usr/bin/env python3
"""Writes scores.json: random tag sequences, well formed and not, and what others count in them.

    pip install seqeval==1.2.2 conlleval==0.2
    python3 tests/golden/scores.py

seqeval (its default mode) and conlleval must agree on every case, or nothing is written.
"""
import json
import random
from pathlib import Path

import conlleval
from seqeval.metrics import f1_score
from seqeval.metrics.sequence_labeling import get_entities

SLOTS = ["city", "day", "fare.amount"]


def sequence(length):
    return [random.choice(["O", "O"] + [kind + slot for slot in SLOTS for kind in ("B-", "I-")]) for _ in range(length)]


def misheard(tags, odds):
    return [random.choice(sequence(1)) if random.random() < odds else tag for tag in tags]


def case(odds):
    meant = [sequence(random.randint(1, 9)) for _ in range(random.randint(1, 6))]
    heard = [misheard(tags, odds) for tags in meant]
    f1 = 100 * f1_score(meant, heard, zero_division=0)
    lines = []
    for pair in zip(meant, heard):
        lines += [f"word {wanted} {found}" for wanted, found in zip(*pair)] + [""]
    theirs = conlleval.evaluate(lines)
    assert abs(f1 - 100 * theirs["overall"]["chunks"]["evals"]["f1"]) < 1e-6, (meant, heard, f1, theirs)
    spans = [set(get_entities(tags)) for tags in (meant, heard)]
    slots = {}
    for slot, counts in sorted(theirs["slots"]["chunks"].items()):
        ours = [{span for span in part if span[0] == slot} for part in spans]
        found = {"present": len(ours[0]), "found": len(ours[1]), "right": len(ours[0] & ours[1])}
        assert found == dict(
            zip(("present", "found", "right"), (counts["stats"][n] for n in ("gold", "pred", "correct")))
        )
        slots[slot] = found
    return {"meant": meant, "heard": heard, "f1": f1, "slots": slots}


random.seed(7)
cases = [case(odds) for odds in (0.0, 0.1, 0.3, 1.0) for _ in range(8)]
Path(__file__).with_name("scores.json").write_text(json.dumps(cases) + "\n")
