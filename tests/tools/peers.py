"""Answers of transformers, its companions and SQuAD's script, to compare with ours. Prints a JSON line per case.

Run it with a Python that has torch and transformers (see make_golden.py):

    python tests/tools/peers.py export FOLDER OUTPUTS.npz [FOLDER OUTPUTS.npz ...]
    python tests/tools/peers.py predict FOLDER INPUTS.json [FOLDER INPUTS.json ...]
    python tests/tools/peers.py adapters FOLDER INPUTS.json [FOLDER INPUTS.json ...]     (needs peft)
    python tests/tools/peers.py vectors FOLDER TEXTS.json [FOLDER TEXTS.json ...]     (needs sentence-transformers)
    python tests/tools/peers.py scores FOLDER TEXTS.json [FOLDER TEXTS.json ...]     (needs sentence-transformers)
    python tests/tools/peers.py programs FOLDER TEXTS.json [FOLDER TEXTS.json ...]     (needs fastembed)
    python tests/tools/peers.py likelihoods FOLDER TEXTS.json [FOLDER TEXTS.json ...]     (needs minicons)
    python tests/tools/peers.py encoders FOLDER TEXTS.json [FOLDER TEXTS.json ...]
    python tests/tools/peers.py tokenizers TEXTS.json FOLDER [FOLDER ...]
    python tests/tools/peers.py squad QUESTIONS.json [QUESTIONS.json ...]     (needs transformers before version 5)
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

# Names in bert_jax and in transformers; the first pair that both have is compared.
OUTPUTS = (
    ("pooled", "pooler_output"),
    ("vocabulary_logits", "prediction_logits"),
    ("vocabulary_logits", "logits"),
    ("next_sentence_logits", "seq_relationship_logits"),
    ("next_sentence_logits", "logits"),
    ("class_logits", "logits"),
    ("choice_logits", "logits"),
    ("tag_logits", "logits"),
    ("start_logits", "start_logits"),
    ("end_logits", "end_logits"),
)
BY_TOKEN = ("hidden_", "vocabulary_logits", "tag_logits", "start_logits", "end_logits")
MOST_PIECES = 30  # in an answer, as in run_squad.py of google-research/bert


def read_json(file: str | Path) -> Any:
    return json.loads(Path(file).read_text(encoding="utf-8"))


def export(folder: str, outputs: str) -> dict[str, Any]:
    """Loads an exported folder and compares its outputs with those of bert_jax.

    Args:
        outputs: An .npz file: input_ids, attention_mask and, for a model with segments, segment_ids, i64[B,T]; the
            outputs of bert_jax by the names in OUTPUTS; a text. Rows of a multiple-choice model are one question.

    Returns:
        The architecture; the names of missing, unexpected and mismatched tensors; the largest absolute differences at
        real tokens; and the text's ids.
    """
    with np.load(outputs) as file:
        expected = dict(file)
    architecture = read_json(f"{folder}/config.json")["architectures"][0]
    # A narrower dtype in the file is widened, so that outputs are float32.
    reference = getattr(transformers, architecture)
    model, loading = reference.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    real = expected["attention_mask"] == 1
    inputs = {"input_ids": expected["input_ids"], "attention_mask": expected["attention_mask"]}
    if "segment_ids" in expected:
        inputs["token_type_ids"] = expected["segment_ids"]
    if "choice_logits" in expected:
        inputs = {name: value[None] for name, value in inputs.items()}
    with torch.no_grad():
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        computed = model.eval()(**tensors, output_hidden_states=True)
    values = {f"hidden_{depth}": state for depth, state in enumerate(computed.hidden_states)}
    for own_name, name in OUTPUTS:
        if own_name in expected and own_name not in values and getattr(computed, name, None) is not None:
            values[own_name] = getattr(computed, name)
    differences = {}
    for name, value in values.items():
        difference = np.abs(value.numpy().reshape(expected[name].shape) - expected[name])
        differences[name] = float((difference[real] if name.startswith(BY_TOKEN) else difference).max())
    return {
        "architecture": architecture,
        "missing": sorted(loading["missing_keys"]),
        "unexpected": sorted(loading["unexpected_keys"]),
        "mismatched": sorted(map(str, loading["mismatched_keys"])),
        "differences": differences,
        "tokens": transformers.AutoTokenizer.from_pretrained(folder)(str(expected["text"]))["input_ids"],
    }


def classes(folder: str, inputs: list[dict]) -> list[Any]:
    """Returns the label and score of every text, with all scores."""
    pipe = transformers.pipeline("text-classification", folder, top_k=None)
    answers = [pipe(case) for case in inputs]
    return [answer[0] if isinstance(answer[0], list) else answer for answer in answers]


def tags(folder: str, inputs: list[dict]) -> list[Any]:
    """Returns the label, score, start and end of every token."""
    pipe = transformers.pipeline("token-classification", folder, ignore_labels=[])
    return [[{**piece, "score": float(piece["score"])} for piece in pipe(case["text"])] for case in inputs]


def answers(folder: str, inputs: list[dict]) -> list[Any]:
    """Returns the answer with the best logits. transformers 5 has no pipeline for questions."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for case in inputs:
        encoded = words(case["question"], case["context"], return_tensors="pt", return_offsets_mapping=True)
        places = encoded.pop("offset_mapping")[0].tolist()
        in_context = [part == 1 for part in encoded.sequence_ids(0)]
        with torch.no_grad():
            logits = model(**encoded)
        begin, end = logits.start_logits[0], logits.end_logits[0]
        spans = [
            (float(begin[first] + end[last]), places[first][0], places[last][1])
            for first in range(len(places))
            for last in range(first, min(first + MOST_PIECES, len(places)))
            if in_context[first] and in_context[last]
        ]
        _, start, stop = max(spans)
        found.append({"answer": case["context"][start:stop], "start": start, "end": stop})
    return found


def choices(folder: str, inputs: list[dict]) -> list[Any]:
    """Returns the probability of every choice. transformers 5 has no pipeline for choices."""
    model = transformers.AutoModelForMultipleChoice.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for case in inputs:
        count = len(case["choices"])
        encoded = words([case["context"]] * count, case["choices"], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: value[None] for name, value in encoded.items()}).logits
        found.append(torch.softmax(logits[0], dim=-1).tolist())
    return found


PREDICT = {
    "ForSequenceClassification": classes,
    "ForTokenClassification": tags,
    "ForQuestionAnswering": answers,
    "ForMultipleChoice": choices,
}


def predict(folder: str, file: str) -> list[Any]:
    """Predicts for a list of objects: text; text and text_pair; question and context; context and choices."""
    architecture = read_json(f"{folder}/config.json")["architectures"][0]
    (function,) = (function for name, function in PREDICT.items() if architecture.endswith(name))
    return function(folder, read_json(file))


def adapters(folder: str, file: str) -> list[Any]:
    """Returns the logits of a classifier with three labels, whose adapters and base model peft loads."""
    import peft

    batch = {name: torch.tensor(rows) for name, rows in read_json(file).items()}
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    with torch.no_grad():
        return model(**batch).logits.tolist()


def vectors(folder: str, file: str) -> dict[str, Any]:
    """Returns the vectors of texts: by default, as queries and as documents."""
    from sentence_transformers import SentenceTransformer

    model, texts = SentenceTransformer(folder, device="cpu"), read_json(file)
    ways = {"default": model.encode, "query": model.encode_query, "document": model.encode_document}
    return {name: way(texts).tolist() for name, way in ways.items()}


def scores(folder: str, file: str) -> list[Any]:
    """Returns the predictions by a CrossEncoder of pairs: each text with itself."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(folder, device="cpu").predict([(text, text) for text in read_json(file)]).tolist()


def likelihoods(folder: str, file: str) -> dict[str, list[float]]:
    """Returns the pseudo-log-likelihoods of texts by masking, as minicons computes them."""
    from minicons import scorer

    model, texts = scorer.MaskedLMScorer(folder, "cpu"), read_json(file)
    # Encoded here, because minicons 0.3 calls a method of the tokenizer that transformers 5 no longer has.
    encoded = model.tokenizer(texts, padding="longest")
    return {
        masking: model.sequence_score(encoded, reduction=lambda values: values.sum(0).item(), PLL_metric=masking)
        for masking in ("original", "within_word_l2r")
    }


def programs(folder: str, file: str) -> dict[str, Any]:
    """Returns the normalized means of token vectors, as each ONNX program computes them in fastembed."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    found = {}
    width = read_json(f"{folder}/config.json")["hidden_size"]
    for program in ("onnx/model.onnx", "onnx/model_quantized.onnx"):
        name = f"{folder}/{program}"
        source = ModelSource(hf=folder)
        TextEmbedding.add_custom_model(
            name, pooling=PoolingType.MEAN, normalization=True, sources=source, dim=width, model_file=program
        )
        model = TextEmbedding(name, specific_model_path=folder)
        found[program] = [vector.tolist() for vector in model.embed(read_json(file))]
    return found


def encoders(folder: str, file: str) -> list[Any]:
    """Returns the last hidden state of the first token, and the pooler's output."""
    model, words = (
        transformers.AutoModel.from_pretrained(folder).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    with torch.no_grad():
        computed = model(**words(read_json(file), padding=True, return_tensors="pt"))
    return [computed.last_hidden_state[:, 0].tolist(), computed.pooler_output.tolist()]


def encode(texts: list[str], folder: str) -> dict[str, Any]:
    """Returns class and size of a tokenizer, ids of all texts and of one pair, and the ids of special tokens."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        "class": type(loaded).__name__,
        "size": len(loaded),
        "ids": loaded(texts, add_special_tokens=False)["input_ids"],
        "pair": loaded(texts[0], texts[1])["input_ids"],
        "roles": [getattr(loaded, f"{role}_token_id") for role in ("pad", "unk", "cls", "sep", "mask")],
    }


def squad(file: str) -> dict[str, Any] | None:
    """Scores answers by squad_metrics, which follows SQuAD 2.0's official script; None if transformers lacks it.

    Args:
        file: A list of {answers: [text, ...], guess, no_answer, threshold (only the first one's is used)}.
            tests/testdata/squad_metrics.json holds such questions and their scores.

    Returns:
        The metrics by name, and `exact` and `f1` of every question under `each`.
    """
    try:
        from transformers.data.metrics.squad_metrics import get_raw_scores, squad_evaluate
    except ImportError:
        return None
    questions = {str(number): question for number, question in enumerate(read_json(file))}
    examples = [
        SimpleNamespace(qas_id=name, answers=[{"text": text} for text in question["answers"]])
        for name, question in questions.items()
    ]
    guesses, no_answer = ({name: case[key] for name, case in questions.items()} for key in ("guess", "no_answer"))
    exact, f1 = get_raw_scores(examples, guesses)
    scores = squad_evaluate(examples, guesses, no_answer, questions["0"]["threshold"])
    return dict(scores) | {"each": [[exact[name], f1[name]] for name in guesses]}


def main(command: str, *arguments: str) -> None:
    # These commands also show whether parameters were missing.
    if command not in ("vectors", "encoders"):
        transformers.logging.set_verbosity_error()
    if command == "squad":
        reports = map(squad, arguments)
    elif command == "tokenizers":
        texts = read_json(arguments[0])
        reports = (encode(texts, folder) for folder in arguments[1:])
    else:
        functions = (export, predict, adapters, vectors, scores, likelihoods, programs, encoders)
        function = {function.__name__: function for function in functions}[command]
        reports = map(function, arguments[::2], arguments[1::2])
    for report in reports:
        print(json.dumps(report, default=int), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
