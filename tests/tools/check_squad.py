"""Scores answers to questions by transformers' squad_metrics, which follow the official script of SQuAD 2.0.

Run with a Python whose transformers still has them (before 5):

    python tests/tools/check_squad.py QUESTIONS.json [QUESTIONS.json ...]

QUESTIONS.json is a list of {answers: [text, ...], guess, no_answer, threshold (of the first counts)}. Prints a JSON
object for each: the metrics by name, and `exact` and `f1` of each question under `each`. Prints `null` without
squad_metrics. tests/testdata/squad_metrics.json has such questions and what this printed of them.
"""

import json
import sys
from types import SimpleNamespace

try:
    from transformers.data.metrics.squad_metrics import get_raw_scores, squad_evaluate
except ImportError:
    print("null")
    sys.exit()


def score(questions: list[dict]) -> dict:
    examples = [
        SimpleNamespace(qas_id=str(number), answers=[{"text": text} for text in question["answers"]])
        for number, question in enumerate(questions)
    ]
    guesses = {str(number): question["guess"] for number, question in enumerate(questions)}
    no_answer = {str(number): question["no_answer"] for number, question in enumerate(questions)}
    exact, f1 = get_raw_scores(examples, guesses)
    found = squad_evaluate(examples, guesses, no_answer, questions[0]["threshold"])
    return dict(found) | {"each": [[exact[name], f1[name]] for name in guesses]}


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            print(json.dumps(score(json.load(file))))
