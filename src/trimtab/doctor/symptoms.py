"""The rows of the diagnostic index: what is measured, from when on it is a warning, and what it hides.

Rows 1 to 30 follow the stages of "Generate, Filter, Control, Replay" (arXiv 2605.02913); thresholds, order and the
graph of causes are chosen here. Rows 31 to 33 are additions for faults of the data themselves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symptom:
    """One row: ``indicator`` says what is measured; ``warn`` above ``critical`` means that low values are bad."""

    row: int
    name: str
    stage: str
    indicator: str
    warn: float
    critical: float


_ROWS = (
    (1, "all-wrong groups", "G,C", "share of groups with every reward at the floor", 0.30, 0.60),
    (2, "all-right groups", "C", "share of groups with every reward at the ceiling", 0.30, 0.60),
    (3, "few boundary prompts", "C", "share of prompts solved at a rate in [0.2, 0.8]", 0.30, 0.10),
    (4, "entropy collapse", "G", "mean token entropy over its median in the first 20 steps", 0.50, 0.25),
    (5, "entropy blow-up", "G", "mean token entropy over its median in the first 20 steps", 2.0, 4.0),
    (6, "near-duplicate rollouts", "G", "sum of squared answer shares, mean over groups", 0.70, 0.90),
    (7, "narrowing support", "G,F", "(pass@K - pass@1) over its median in the first 20 steps", 0.50, 0.25),
    (
        8,
        "length inflation",
        "C",
        "median length over its first 20 steps, minus 1, while accuracy did not rise",
        0.50,
        1.0,
    ),
    (9, "truncation", "C", "share ended by the length cap", 0.05, 0.20),
    (10, "stragglers", "C", "idle share of a synchronous step, 1 - mean / max length", 0.50, 0.75),
    (11, "malformed outputs", "F", "share without a readable answer", 0.10, 0.30),
    (12, "verifier noise", "F", "J = 1 - false positives - false negatives, from audits", 0.90, 0.70),
    (13, "evaluator failures", "F", "share whose evaluator timed out or raised", 0.01, 0.05),
    (14, "reward hacking", "F", "slope of reward minus slope of audits, in standard errors", 2.0, 4.0),
    (15, "judge bias", "F", "verdicts that flip with the order; |correlation of score and length|", 0.10, 0.25),
    (16, "misaligned process score", "F", "area under the curve of the step score against the outcome", 0.70, 0.60),
    (17, "few samples dominate", "F,C", "effective sample size over n, weights |advantage| x importance", 0.50, 0.20),
    (18, "stale data", "C,R", "tokens outside the clip range; or the 95th percentile of the version lag", 0.20, 0.40),
    (19, "train/engine mismatch", "C", "|trainer - engine| log-prob, nats a token", 0.02, 0.10),
    (20, "wasted budget", "C", "tokens in groups without variance", 0.40, 0.70),
    (21, "starvation", "C", "prompts unseen for 3 epochs", 0.20, 0.50),
    (22, "premature stop", "C", "audited early stops that would have succeeded", 0.05, 0.15),
    (23, "over-thinking", "C", "share of a response after its first stable answer", 0.40, 0.60),
    (24, "poor tree", "G,C", "sibling pairs with equal answer and overlap above 0.8", 0.30, 0.60),
    (25, "hint dependence", "G", "success with a hint minus without, same prompts", 0.20, 0.40),
    (26, "replay over-use", "R", "replayed share; or the median age of replays in versions", 0.50, 0.80),
    (27, "corrupted replay", "R", "stored items that fail the current verifier", 0.02, 0.10),
    (28, "self-evolution drift", "R", "generated tasks that fail an independent check", 0.10, 0.30),
    (29, "environment drift", "G,F", "|z| of the tool error rate, this window against the last", 3.0, 5.0),
    (30, "looping agent", "C", "repeated calls over calls", 0.20, 0.40),
    (31, "length collapse", "G", "median length over its first 20 steps, while accuracy did not rise", 0.50, 0.25),
    (32, "repetition", "G", "share of responses that end in a loop", 0.05, 0.20),
    (33, "invalid numbers", "F,C", "share with NaN, infinity or a positive log-prob", 0.0, 0.01),
)

SYMPTOMS: dict[int, Symptom] = {row[0]: Symptom(*row) for row in _ROWS}

# A cause to the symptoms it explains. Beside the reconstruction of the index: a group that is constant for a named
# reason also wastes its budget, is no boundary prompt and leaves pass@K nothing to gain (1, 2), and right answers are
# equal (2); a reward that is being gamed looks like a noisy verifier and ends in all-right groups (14); loops run to
# the cap (32); NaN poisons whatever is computed from it (33).
EXPLAINS: dict[int, tuple[int, ...]] = {
    1: (3, 7, 20),
    2: (3, 6, 7, 20),
    4: (6, 7),
    6: (7,),
    8: (9, 10),
    9: (1,),
    11: (1,),
    12: (1,),
    13: (1, 11),
    14: (2, 12),
    18: (17,),
    19: (4, 17, 18),
    29: (11, 13),
    32: (6, 8, 9, 10),
    33: (17, 19),
}
