"""Prints the predictions of transformers for an exported folder, by its pipelines where it has one for the task.

Run with a Python that has torch and transformers:

    python tests/tools/run_pipelines.py FOLDER INPUTS.json [FOLDER INPUTS.json ...]

INPUTS.json holds a list of objects: text; text and text_pair; question and context; context and choices. Prints a JSON
list per folder with one answer per input: label and score of a text, and all scores; for a tagger the label, score,
start and end of every token; for a question the answer with the best logits; for choices the probability of each.
Question answering and multiple choice have no pipeline in transformers 5, so their models are run directly.
"""

import json
import sys
from typing import Any

import torch
import transformers

MOST_PIECES = 30  # in an answer, as in run_squad.py of google-research/bert


def classes(folder: str, inputs: list[dict]) -> list[Any]:
    pipe = transformers.pipeline("text-classification", folder, top_k=None)
    return [pipe(one)[0] if isinstance((found := pipe(one))[0], list) else found for one in inputs]


def tags(folder: str, inputs: list[dict]) -> list[Any]:
    pipe = transformers.pipeline("token-classification", folder, ignore_labels=[])
    pieces = [pipe(one["text"]) for one in inputs]
    return [[{**piece, "score": float(piece["score"])} for piece in found] for found in pieces]


def answers(folder: str, inputs: list[dict]) -> list[Any]:
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    told = []
    for one in inputs:
        encoded = words(one["question"], one["context"], return_tensors="pt", return_offsets_mapping=True)
        places = encoded.pop("offset_mapping")[0].tolist()
        of_context = [part == 1 for part in encoded.sequence_ids(0)]
        with torch.no_grad():
            found = model(**encoded)
        begin, end = found.start_logits[0], found.end_logits[0]
        spans = [
            (float(begin[first] + end[last]), places[first][0], places[last][1])
            for first in range(len(places))
            for last in range(first, min(first + MOST_PIECES, len(places)))
            if of_context[first] and of_context[last]
        ]
        _, start, stop = max(spans)
        told.append({"answer": one["context"][start:stop], "start": start, "end": stop})
    return told


def choices(folder: str, inputs: list[dict]) -> list[Any]:
    model = transformers.AutoModelForMultipleChoice.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    told = []
    for one in inputs:
        count = len(one["choices"])
        encoded = words([one["context"]] * count, one["choices"], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: value[None] for name, value in encoded.items()}).logits
        told.append(torch.softmax(logits[0], dim=-1).tolist())
    return told


BY_CLASS = {
    "ForSequenceClassification": classes,
    "ForTokenClassification": tags,
    "ForQuestionAnswering": answers,
    "ForMultipleChoice": choices,
}


def run(folder: str, file: str) -> None:
    with open(f"{folder}/config.json", encoding="utf-8") as stream:
        architecture = json.load(stream)["architectures"][0]
    with open(file, encoding="utf-8") as stream:
        inputs = json.load(stream)
    (function,) = (one for name, one in BY_CLASS.items() if architecture.endswith(name))
    print(json.dumps(function(folder, inputs), default=int))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run(*pair)
