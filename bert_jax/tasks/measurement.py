"""The metrics of a task on its files; the files that leaderboards accept; folders in BEIR's layout."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.runtime import Runtime
from bert_jax.progress import print_note
from bert_jax.storage.files import SUFFIXES, write_atomic
from bert_jax.tasks import named, registry
from bert_jax.tasks.inference import (
    FineTuned,
    Predictor,
    task_params,
    tokenizer_of,
    with_max_length,
    with_null_threshold,
)
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.embedding import EmbeddingTask
from bert_jax.tasks.labels import NamedLabelsTask, parse_names, parse_number
from bert_jax.tasks.metrics import Nearest, rank_metrics
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.tables import Columns, numbered_lines, plain_name
from bert_jax.tasks.registry import task_of
from bert_jax.tasks.rows import Split, TaskRows
from bert_jax.tasks.task import Task
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import distributed, sharding
from bert_jax.train.evaluation import Evaluator
from bert_jax.train.run import runtime_of
from bert_jax.train.step import Plan

# The metrics of a task on its files: in the training loop, at its end, and for `bert-jax evaluate`.


def counts(rows: TaskRows, task: Task, tokenizer: Vocabulary) -> dict[str, int]:
    """The size of a split: examples (sentences), rows, tokens, unknown_tokens, truncated, and Task.counts.

    Also left_out, the number of unreadable lines (Split.left_out), if there are any.
    """
    found = {
        "examples": len(rows.split.items),
        "rows": rows.count,
        "tokens": len(rows.input_ids),
        "unknown_tokens": int((rows.input_ids == tokenizer.unk_id).sum()) if tokenizer.has_unknown else 0,
        "truncated": rows.truncated,
    }
    if rows.split.left_out:
        found["left_out"] = rows.split.left_out
    return found | task.counts(rows)


def file_remarks(path: Path) -> list[str]:
    """A message, as a list of lines, if a path stands for several files (reading/parquet_parts.py)."""
    count = len(tables.files_of(path))
    return [f"{path}: reading all {count} files of this data set as one"] if count > 1 else []


def remarks(rows: TaskRows, task: Task) -> list[str]:
    """Warnings about a split, one line each: what was cut or left out, and Task.remarks."""
    found = []
    if rows.split.left_out:
        found.append(
            f"{rows.split.path}: {rows.split.left_out} lines are skipped, because their number of fields differs"
        )
    if rows.truncated:
        what = rows.cut_part or f"of {len(rows.split.items)} examples"
        limit = f"task.{rows.cut_option}={getattr(task, rows.cut_option)}"
        found.append(f"{rows.split.path}: {rows.truncated} {what} lost tokens to {limit}")
    return found + task.remarks(rows)


def make_evaluator(task: Task, rows: TaskRows, batch_size: int) -> Callable[[Plan, Mesh], Evaluator]:
    """An element of Run.evaluators that measures the task on labelled rows."""

    def make(plan: Plan, mesh: Mesh) -> Evaluator:
        predictor = Predictor(task, plan.model, _compiling_fast(plan.runtime), mesh)
        return lambda params, _: predictor.measure(params, rows, batch_size)

    return make


def measure(
    task: Task, model: ModelConfig, config: TrainConfig, params: Mapping[str, Any], rows: TaskRows
) -> dict[str, float]:
    """The task's metrics, and task_loss, of labelled rows with trained parameters. config says how to run the model."""
    mesh = sharding.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        predictor = Predictor(task, model, _compiling_fast(runtime_of(config)), mesh)
        return predictor.measure(params, rows, config.evaluation_rows(config.batch_size))


def _compiling_fast(runtime: Runtime) -> Runtime:
    """With layers in a scan, unless model.layer_loop is set: files are small, and each length of rows is compiled."""
    return dataclasses.replace(runtime, layer_loop="scan") if runtime.layer_loop == "auto" else runtime


@dataclass(frozen=True)
class Evaluation:
    """metrics by name (with the metric_prefix of their split); counts by split; remarks on all splits."""

    metrics: dict[str, float]
    counts: dict[str, dict[str, int]]
    remarks: tuple[str, ...] = ()


def evaluate(
    loaded: LoadedModel,
    data: str | Path,
    config: TrainConfig | None = None,
    columns: Columns | None = None,
    label_map: str = "",
    max_length: int = 0,
    metrics: str = "",
    positive: str = "",
    null_threshold: float | None = None,
    truncate_dim: int = 0,
) -> Evaluation:
    """Measures a fine-tuned checkpoint on a labelled file, or on all labelled splits of a folder except train.

    The file has the columns of the training files unless columns names others (a Hugging Face folder does not record
    them). label_map says which labels of the model those of the file mean (FILE_LABEL:LABEL,...), where they are not
    the same (label_names.py). max_length and truncate_dim replace those of training, unless they are 0. metrics names
    those to return, and positive is the class that f1, precision and recall are of; empty: as in training (accuracy and
    macro_f1 of a Hugging Face folder, with positive accuracy and f1). null_threshold is the probability of no answer
    above which a question has none; None: that of the checkpoint. Thresholds that the checkpoint does not record, such
    as those of a run that has not ended, are 1/2, as in predictions. config says how to run the model (batch_size,
    compute_dtype). Raises UserError for a checkpoint that was not fine-tuned, an unknown label or metric, a label_map,
    a positive class, a null_threshold or a truncate_dim for a task without them, a max_length that the model does not
    have, and a folder without such files.
    """
    config = config or TrainConfig(batch_size=32)
    task = with_max_length(task_of(loaded), max_length, loaded.model)
    task = dataclasses.replace(task, columns=(columns or task.columns).filled(task.columns))
    if label_map:
        if not isinstance(task, NamedLabelsTask):
            raise UserError(
                f"--label_map is {label_map!r}, but a task of kind {task.kind} has no labels to map; omit it"
            )
        task = dataclasses.replace(task, label_map=label_map)
    task = with_null_threshold(task, null_threshold)
    task = task.calibrated({})  # thresholds chosen on the measured file would flatter the model
    if truncate_dim:
        if not isinstance(task, EmbeddingTask):
            raise UserError(f"--truncate_dim is {truncate_dim}, but a task of kind {task.kind} has no vectors; omit it")
        task = dataclasses.replace(task, truncate_dim=truncate_dim)
        task.check_model(loaded.model)
    task = _with_metrics(task, metrics, positive)
    found = {name: registry.read(task, path, label_required=False) for name, path in _files(task, Path(data)).items()}
    labelled = {split: content for split, content in found.items() if content.labelled}
    if not labelled:
        raise UserError(f"{data} has no labels (column {task.columns.label!r}), which evaluation needs")
    tokenizer = tokenizer_of(loaded)
    params = task_params(loaded, task, sharding.make_mesh(config.mesh))
    values: dict[str, float] = {}
    sizes: dict[str, dict[str, int]] = {}
    messages: list[str] = []
    for name, split in labelled.items():
        if metrics:
            task.check_metrics(split)
        rows = task.encode(split, tokenizer)
        sizes[name] = counts(rows, task, tokenizer)
        split_task = task if metrics else registry.metrics_of(task, _split_of(task, name, split.path))
        measured = measure(split_task, loaded.model, config, params, rows)
        values |= {f"{metric_prefix(name)}{metric}": value for metric, value in measured.items()}
        messages += file_remarks(split.path) + remarks(rows, split_task)
        if math.isnan(measured["task_loss"]) and any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(params)):
            messages.append(f"{split.path}: metrics mean nothing, as parameters are NaN; use an earlier checkpoint")
    return Evaluation(values, sizes, tuple(messages))


def _with_metrics(task: Task, metrics: str, positive: str) -> Task:
    """The task with other metrics and another positive class, where they are given."""
    if positive:
        if not isinstance(task, ClassificationTask):
            raise UserError(
                f"--positive is {positive!r}, but a task of kind {task.kind} has no positive class; omit it"
            )
        task = dataclasses.replace(task, positive=positive, metrics=()).with_metrics()
    if metrics:
        task = dataclasses.replace(task, metrics=parse_names("--metrics", metrics))
    return task


def metric_prefix(split: str) -> str:
    """The prefix of the metrics of a split: none for dev, else its name (`test_`, `dev_mismatched_`)."""
    return "" if split in ("dev", "data") else f"{split}_"


def _split_of(task: Task, name: str, path: Path) -> str:
    """The split of a file; where a file was named, by its name."""
    return named.TASKS[task.name].split_of(path) if name == "data" and task.name in named.TASKS else name


def _files(task: Task, data: Path) -> dict[str, Path]:
    """The files to measure, by split; a single file is called `data`."""
    if not data.is_dir():
        return {"data": data}
    splits = [split for split in registry.splits_of(task.name) if split != "train"]
    folder = registry.find_folder(task.name, data, splits) if task.name in named.TASKS else data
    found = {split: path for split in splits if (path := registry.find_split(task.name, folder, split))}
    if not found:
        raise UserError(f"{folder} contains neither dev nor test of the task (such as dev.tsv). Name a file")
    return found


# Writes the files that the leaderboards of GLUE, SuperGLUE and SQuAD accept, made from the predictions of a split.
#
# GLUE: https://gluebenchmark.com/faq (a table of index and prediction); SuperGLUE: https://super.gluebenchmark.com/faq
# (one JSON object per line). The index is the position of an example in the benchmark's own file, from 0. SQuAD: an
# object of answers by question id, and one of the odds of no answer, as run_squad.py of google-research/bert names and
# writes them.


STSB_RANGE = (0.0, 5.0)

# The name of the file by task and split.
FILES: dict[tuple[str, str], str] = {
    ("cola", "test"): "CoLA.tsv",
    ("sst2", "test"): "SST-2.tsv",
    ("mrpc", "test"): "MRPC.tsv",
    ("stsb", "test"): "STS-B.tsv",
    ("qqp", "test"): "QQP.tsv",
    ("mnli", "test"): "MNLI-m.tsv",
    ("mnli", "test_mismatched"): "MNLI-mm.tsv",
    ("mnli", "ax"): "AX.tsv",
    ("qnli", "test"): "QNLI.tsv",
    ("rte", "test"): "RTE.tsv",
    ("wnli", "test"): "WNLI.tsv",
    ("boolq", "test"): "BoolQ.jsonl",
    ("cb", "test"): "CB.jsonl",
    ("copa", "test"): "COPA.jsonl",
    ("superglue_rte", "test"): "RTE.jsonl",
    ("wic", "test"): "WiC.jsonl",
}


def file_name(task_name: str, split: str) -> str:
    """The name of the file that a leaderboard accepts for a split of a task; empty if none accepts it."""
    return FILES.get((task_name, split), "")


def check(task_name: str, splits: Iterable[str]) -> None:
    """Raises UserError if no leaderboard accepts predictions of any of these splits of a task."""
    if not any(file_name(task_name, split) for split in splits):
        accepted = ", ".join(f"{name} ({split})" for name, split in FILES)
        raise UserError(
            f"no leaderboard accepts predictions of {' or '.join(splits)} of task {task_name}; "
            f"omit task.submission, or use one of: {accepted}"
        )


def write_submission(task: Task, split: str, predictions: Sequence[Mapping[str, Any]], directory: str | Path) -> Path:
    """Writes the leaderboard's file of a split into a folder, which is created if necessary, and returns its path.

    predictions are Task.predictions of all examples of the split, in the order of its file. Scores of STS-B are clipped
    to 0 ... 5. Raises UserError for a task or split that no leaderboard accepts, and for no predictions.
    """
    check(task.name, [split])
    if label_map := getattr(task, "label_map", ""):
        raise UserError(
            f"the checkpoint answers with the labels of task.label_map={label_map}, but the leaderboard expects those "
            "of its own files. Fine-tune without a map"
        )
    path = Path(directory) / file_name(task.name, split)
    if not predictions:
        raise UserError(f"there are no predictions for {path.name}; use the unlabelled file of the benchmark")
    labels = [_label(task, prediction) for prediction in predictions]
    if path.suffix == ".jsonl":
        lines = [
            json.dumps({"idx": index, "label": int(label) if label.isdecimal() else label})
            for index, label in enumerate(labels)
        ]
    else:
        lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(labels))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def write_squad(predictions: Sequence[Mapping[str, Any]], directory: str | Path) -> list[Path]:
    """Writes predictions.json and, for questions that may have no answer, null_odds.json, and returns their paths.

    predictions.json has the answer to each question by id, which is empty where the probability of no answer is above
    the task's threshold. null_odds.json has the score for no answer minus that of the best answer; evaluate-v2.0.py
    reads it as --na-prob-file. Raises UserError for an id that two questions have.
    """
    answers = {str(one["id"]): one["answer"] for one in predictions}
    if len(answers) < len(predictions):
        raise UserError(
            f"{len(predictions)} questions have only {len(answers)} different ids, by which SQuAD's files name "
            "answers. Give each question an id of its own"
        )
    files: dict[str, dict[str, Any]] = {"predictions.json": answers}
    if predictions and "null_odds" in predictions[0]:
        files["null_odds.json"] = {str(one["id"]): one["null_odds"] for one in predictions}
    Path(directory).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(Path(directory) / name, (json.dumps(content, ensure_ascii=False, indent=4) + "\n").encode())
    return [Path(directory) / name for name in files]


def submit(model: FineTuned, splits: Mapping[str, Split[Any]], directory: str | Path) -> list[Path]:
    """Predicts the splits that a leaderboard accepts, writes their files and returns the paths.

    All processes of a run predict; the first one writes.
    """
    written = []
    for split, content in splits.items():
        if file_name(model.task.name, split):
            predictions = model.predictions(model.encode(dataclasses.replace(content, labelled=False)))
            if distributed.is_primary():
                written.append(write_submission(model.task, split, predictions, directory))
    return written


def _label(task: Task, prediction: Mapping[str, Any]) -> str:
    if task.kind == "regression":
        low, high = STSB_RANGE
        return f"{min(max(prediction['score'], low), high):.3f}"
    return str(prediction["label"])


# Measures retrieval on a folder in the layout of BEIR (Thakur et al. 2021).
#
# corpus.jsonl   {"_id": ..., "title": ..., "text": ...} on each line; the text of a document is its title and its text
# queries.jsonl  {"_id": ..., "text": ...}
# qrels/*.tsv    query-id, corpus-id, score, with or without a header; a score above 0 marks a relevant document
#
# Text files may be compressed. The corpus is read in chunks, twice: for its identifiers, and for its texts.


CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
PREFERRED = ("test", "dev")  # the split that is measured where several are there and none is named
DOCUMENTS_AT_ONCE = 16384
HITS = 100

Embed = Callable[[Sequence[str], str], Float32[np.ndarray, "N D"]]  # (texts, "query" or "document") -> vectors


def is_beir(data: Path) -> bool:
    """Whether a path is a folder in BEIR's layout, or one of its qrels files."""
    return _find(_folder(data), CORPUS) is not None


def measure_beir(data: Path, embed: Embed, skip_self: bool = False) -> tuple[dict[str, float], dict[str, int]]:
    """The metrics of retrieval_metrics, and the numbers of queries and documents.

    data is the folder, of which qrels/test.tsv or qrels/dev.tsv is measured, or the qrels file. Scores are dot
    products. Queries without a relevant document do not count. With skip_self, the document with the identifier of a
    query is none of its hits, as in BEIR; without, a note says how many queries have one. Raises UserError, with file
    and line, for malformed files.
    """
    folder = _folder(data)
    relevant = _read_qrels(data if data != folder else _default_qrels(folder))
    texts = {name: text for name, text in _read(_needed(folder, QUERIES)) if name in relevant}
    if not texts:
        raise UserError(f"{folder}: no query of its qrels file is in {QUERIES}. Use the files of one data set")
    corpus = _needed(folder, CORPUS)
    names = [name for name, _ in _read(corpus)]
    order = np.argsort(np.array(names, dtype=object), kind="stable")
    numbers = np.empty(len(names), np.int64)
    numbers[order] = np.arange(len(names))
    if not skip_self and (count := len(texts.keys() & set(names))):
        print_note(
            f"{count:,} of {len(texts):,} queries have the _id of a document, which may be among their hits, as in "
            "sentence-transformers; --skip_self leaves it out, as BEIR does"
        )
    nearest = Nearest(embed(list(texts.values()), "query"), HITS + skip_self)
    start = 0
    for chunk in _chunks(_read(corpus)):
        nearest.add(embed([text for _, text in chunk], "document"), numbers[start : start + len(chunk)])
        start += len(chunk)
    hits = {}
    for query, found in zip(texts, nearest.documents, strict=True):
        documents = [names[order[number]] for number in found]
        hits[query] = [name for name in documents if not skip_self or name != query][:HITS]
    return rank_metrics(hits, relevant), {"queries": len(texts), "documents": len(names)}


def _folder(data: Path) -> Path:
    return data.parent.parent if data.parent.name == QRELS and data.is_file() else data


def _find(folder: Path, name: str) -> Path | None:
    return next((path for ending in ("", *SUFFIXES) if (path := folder / (name + ending)).is_file()), None)


def _needed(folder: Path, name: str) -> Path:
    found = _find(folder, name)
    if found is None:
        raise UserError(f"{folder} has no {name}; expected BEIR's layout: {CORPUS}, {QUERIES} and {QRELS}/SPLIT.tsv")
    return found


def _default_qrels(folder: Path) -> Path:
    there = {plain_name(path).removesuffix(".tsv"): path for path in sorted((folder / QRELS).glob("*.tsv*"))}
    for split in PREFERRED:
        if split in there:
            return there[split]
    if len(there) != 1:
        found = ", ".join(there) or "none"
        raise UserError(f"{folder / QRELS} has the splits {found}; name one: --data {folder / QRELS}/SPLIT.tsv")
    return next(iter(there.values()))


def _read_qrels(path: Path) -> dict[str, set[str]]:
    relevant: dict[str, set[str]] = {}
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        fields = line.split("\t")
        score = parse_number(fields[-1])  # infinite where it is none
        if number == 1 and len(fields) == 3 and math.isinf(score):
            continue  # the header
        if len(fields) != 3 or not math.isfinite(score):
            raise UserError(
                f"{path} line {number} is {line[:60]!r}; expected query-id, corpus-id and score, separated by tabs"
            )
        if score > 0:
            relevant.setdefault(fields[0], set()).add(fields[1])
    return relevant


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """The identifiers and the texts of a file of JSON lines."""
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
            name, text, title = values["_id"], values["text"], values.get("title") or ""
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f'{path} line {number}: expected an object {{"_id": ..., "text": ...}}') from None
        if not (isinstance(name, str) and isinstance(text, str) and isinstance(title, str)):
            raise UserError(f"{path} line {number}: _id, title and text are strings. Write them in quotes")
        yield name, f"{title} {text}".strip()


def _chunks(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    chunk: list[tuple[str, str]] = []
    for document in documents:
        chunk.append(document)
        if len(chunk) == DOCUMENTS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
