"""Scores answers to questions with the squad_metrics of transformers, which follow the official script of SQuAD 2.0.

Run with a Python whose transformers still has squad_metrics (before version 5):

    python tests/tools/check_squad.py QUESTIONS.json [QUESTIONS.json ...]

QUESTIONS.json is a list of {answers: [text, ...], guess, no_answer, threshold (only the first one's is used)}. Prints a
JSON object per file: the metrics by name, and `exact` and `f1` of each question under `each`. Prints `null` without
squad_metrics. tests/testdata/squad_metrics.json holds such questions and the output for them.
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
    predictions = {str(number): question["guess"] for number, question in enumerate(questions)}
    no_answer = {str(number): question["no_answer"] for number, question in enumerate(questions)}
    exact, f1 = get_raw_scores(examples, predictions)
    found = squad_evaluate(examples, predictions, no_answer, questions[0]["threshold"])
    return dict(found) | {"each": [[exact[name], f1[name]] for name in predictions]}


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            print(json.dumps(score(json.load(file))))
