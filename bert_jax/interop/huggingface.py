"""Reads the Hugging Face format: config.json, weights and tokenizer files, without transformers.

`read` opens a folder, `assemble` builds the model from its tensors (weights.py), and `read_task` reads a fine-tuned
model's task.
"""

import dataclasses
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop import card_metadata, sentence_transformers
from bert_jax.interop import family as families
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import COUNTED, Family
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.interop.sentence_transformers import TOKENIZER_FILE, read_optional
from bert_jax.interop.weights import SETFIT_HEAD, SafetensorsFolder, open_weights
from bert_jax.model.heads.config import Heads
from bert_jax.progress import print_note
from bert_jax.storage.files import read_json, refuse_pickle
from bert_jax.tokenization.vocabulary import Vocabulary

# Files that mark folders in other formats.
PROGRAMS_FILE = "programs.json"  # StableHLO programs
ONNX_FOLDER = "onnx"

CONFIG_FILE = "config.json"
# Model types with another's architecture: how their classes begin, how the other's do, and the other.
EQUAL_TYPES = {"camembert": ("Camembert", "Roberta", "roberta")}
_CAUSAL = ("LMHeadModel", "ForCausalLM")  # how classes of causal models end, which transformers may open as encoders
SHOWN = 4  # names of tensors in a message

SEGMENT_TABLE = "embeddings/segment/table"
# Tokenizers of transformers that give no token types, unless model_input_names has them.
WITHOUT_TYPES = ("Roberta", "XLMRoberta", "MPNet", "DistilBert", "Camembert")
LABELLED = ("classification", "multilabel", "tagging")
# config.json's problem_type for each kind of task with a classifier.
PROBLEM_TYPES = {
    "regression": "regression",
    "classification": "single_label_classification",
    "multilabel": "multi_label_classification",
}
DECISIONS = ("max_length", "threshold", "thresholds", "truncation")  # options of a task that hold for other labels
QUESTION_LENGTH = 384  # as in run_squad.py of google-research/bert, if a folder does not describe the task
TASK_FIELD = "bert_jax_task"  # bert_jax adds a task's columns, metrics and lengths here; transformers preserves it


def read(directory: str | Path) -> LoadedModel:
    """Reads a model of any family in FAMILIES in Hugging Face format.

    The class in config.json determines which heads there must be. Other heads are read, too, if the file has their
    tensors (many published BertForMaskedLM files hold the next-sentence head).

    Raises:
        UserError: The architecture is unknown or only partly supported; a tensor is missing, unexpected or has another
            shape; an output table differs from the token table to which it is tied; weights are pickled; a file is
            damaged; or the tokenizer does not fit the model.
    """
    directory = Path(directory)
    refuse_pickle(directory)
    values = read_config(directory)
    if (directory / SETFIT_HEAD).exists():
        report(
            f"{directory}: {SETFIT_HEAD}, a classifier of SetFit, is a pickle and is not read; the encoder is. Use "
            "SetFit for its classes, or fine-tune the encoder here"
        )
    # The prefix is known only from the family, so the class is looked up again in `assemble`.
    family, _ = named_family(directory / CONFIG_FILE, values)
    return assemble(directory, directory / CONFIG_FILE, values, open_weights(directory, family.prefix))


def passing_pooler(family: Family, class_name: str, width: int) -> dict[str, np.ndarray]:
    """The tensors of a pooler that passes [CLS] on to its tanh, for a model without one; empty if the class has none.

    The class of an encoder alone has a pooler in transformers. Without its tensors it gets random values, with a
    warning. Such a pooler is left out when the folder is read.
    """
    if class_name != family.base_class:
        return {}
    values = {"kernel": np.eye(width, dtype=np.float32), "bias": np.zeros(width, np.float32)}
    return {entry.names[0]: values[entry.path.rpartition("/")[2]] for entry in family.optional.get("pooler", ())}


def _leave_out_passing_pooler(family: Family, weights: SafetensorsFolder) -> None:
    names = [entry.names[0] for entry in family.optional.get("pooler", ())]
    # A pooler is square, so that other shapes, which are reported later, are not compared.
    if not names or not all(name in weights for name in names) or len({*weights.shape(names[0])}) != 1:
        return
    passing = passing_pooler(family, family.base_class, weights.shape(names[0])[0])
    if all(np.array_equal(weights[name], value) for name, value in passing.items()):
        weights.leave_out(passing)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json, and reports what it assumes for a published folder that names no known family and class.

    The result is the encoder that AutoModel of transformers opens.
    """
    file = directory / CONFIG_FILE
    values = read_json(file)
    named, model_type = values.get("architectures"), values.get("model_type")
    class_name = named[0] if isinstance(named, list) and named else named or ""
    # named_family refuses other types with a message.
    if not isinstance(class_name, str) or not isinstance(model_type, str | None):
        return values
    if model_type in EQUAL_TYPES:
        start, other, equal = EQUAL_TYPES[model_type]
        report(f"{file}: model_type {model_type} is read as {equal}, which has the same architecture")
        model_type, class_name = equal, re.sub(f"^{start}", other, class_name)
    elif model_type is None:
        model_type = next((name for name, family in FAMILIES.items() if class_name in family.classes), None)
        reason = "class" if model_type else "tensors"
        if model_type := model_type or _type_by_tensors(directory, values):
            report(f"{file} names no model_type; read as {model_type}, by its {reason}")
    family = FAMILIES.get(model_type or "")
    known = any(class_name in other.classes for other in FAMILIES.values())
    if family and class_name and not known and not class_name.endswith(_CAUSAL):
        report(f"{file}: the class {class_name} is unknown; read as {family.base_class} and the heads that it may have")
        class_name = family.base_class
    return {**values, "model_type": model_type, "architectures": [class_name] if class_name else None}


def _type_by_tensors(directory: Path, values: Mapping[str, Any]) -> str | None:
    """The family whose tensors a folder holds; None for none."""
    names = set(open_weights(directory, ""))

    def fitness(family: Family) -> tuple[bool, int]:
        bare = {name.removeprefix(family.prefix) for name in names}
        # Families with equal names in their base models differ in the prefix that other classes have.
        own = {name.format(0) for entry in family.encoder for name in entry.names} & bare
        return bare != names and len(own) > 1, len(own)

    best = max(FAMILIES.values(), key=fitness)
    # With fewer names in common, the folder holds an architecture of no family.
    if fitness(best)[1] < len(best.encoder) // 2:
        return None
    # RoBERTa counts positions from its padding id, which is 0 in BERT.
    return "roberta" if best.model_type == "bert" and values.get("pad_token_id") == 1 else best.model_type


def assemble(origin: Path, file: Path, values: Mapping[str, Any], weights: SafetensorsFolder) -> LoadedModel:
    """Builds a model from its description and its tensors.

    Args:
        origin: The folder that was opened. If it holds adapters, it may have its own files of sentence-transformers.
        file: config.json, with the tokenizer next to it.
        values: Its content.
        weights: The tensors.

    Raises:
        UserError: As in `read`.
    """
    directory = file.parent
    family, class_name = named_family(file, values)
    settings = next((folder for folder in (origin, directory) if sentence_transformers.is_folder(folder)), None)
    required = [entry for part in family.classes[class_name].values() for entry in part]
    # Folders of sentence-transformers hold the encoder alone, even if config.json still names the class of a head.
    if settings and not all(name in weights for entry in required for name in entry.names):
        class_name = family.base_class

    model = family.read_model(file, values)
    heads = _find_heads(file, values, family, class_name, model, weights)
    # Computing the shapes of millions of layers would take minutes.
    if model.layers > len(weights):
        raise UserError(f"{file}: the model has {model.layers} layers, but its file only {len(weights)} tensors")
    table = family.table(class_name)
    # transformers 4 ties both biases of an untied output, and its files may hold the second one alone.
    twice = [entry.names for entry in table if entry.layout is families.VOCABULARY_TWICE]
    absent = {first: second for first, second in twice if first not in weights and second in weights}
    shapes = families.tensor_shapes(table, model, heads)
    expected = {name: shape for name, shape in shapes.items() if name not in absent}
    further = _further_heads(weights, expected, family)
    if problem := next(_problems(file, weights, expected, family, further), None):
        raise UserError(problem)
    unread = [name for name in weights if name not in expected and (name in family.unread or name in further)]
    if unread:
        shown = ", ".join(unread[:SHOWN]) + (f" and {len(unread) - SHOWN} more" if len(unread) > SHOWN else "")
        report(f"{directory}: not used by the architecture in {file.name}, left out: {shown}")
    params = families.import_params(table, lambda name: weights[absent.get(name, name)], model, heads)
    words = load_vocabulary(directory, model, file.name)
    padding = model.position_offset - 1
    if padding not in (-1, words.pad_id):
        report(
            f"{file}: positions begin after the id {padding}, but the tokenizer pads by {words.pad_id}. In texts with "
            f"{words.tokens([padding])[0]}, which is {padding}, they differ from those in transformers"
        )
    model, params = _match_token_types(directory, values, model, params)
    task = read_task(file, values, model, heads)
    task = _vector_task(settings, settings == origin, task, model, words) if settings else task
    side = read_optional(directory / TOKENIZER_FILE).get("truncation_side", "right")
    if side not in ("right", (task or {}).get("truncation")):
        report(f"{directory / TOKENIZER_FILE}: truncation_side is {side}, but texts lose their end here")
    card = card_metadata.read(origin)
    return LoadedModel(model, heads, params, words, task, dtype=weights.dtype, origin=str(origin), card=card)


def _find_heads(
    file: Path,
    values: Mapping[str, Any],
    family: Family,
    class_name: str,
    model: ModelConfig,
    weights: SafetensorsFolder,
) -> Heads:
    """The heads that the class requires, and optional ones whose tensors are in the file."""
    names = frozenset(family.classes[class_name])
    if class_name == family.base_class:
        _leave_out_passing_pooler(family, weights)
    # One tensor is enough: a missing one of the same head is then an error, not a head that is left out. In a file of
    # the encoder, the head may be another one, and is left out.
    enough = all if class_name == family.base_class and weights.leaves_heads_out else any
    for part, entries in family.optional.items():
        used = [entry for entry in entries if entry.tied in (None, model.tied_output)]
        if part not in names and enough(any(name in weights for name in entry.names) for entry in used):
            # The next-sentence head reads the pooler.
            names |= {part, "pooler"} if part == "next_sentence" else {part}
    fields: dict[str, Any] = {name: 1 if name in COUNTED else True for name in names}
    fields |= output_counts(family, class_name, weights) | family.read_heads(file, values, names)
    return Heads(**fields)


def _vector_task(
    folder: Path, is_own: bool, task: dict[str, Any] | None, model: ModelConfig, words: Vocabulary
) -> dict[str, Any] | None:
    """Reads the task in a folder's files of sentence-transformers, unless the given task takes precedence.

    The files take precedence over an embedding task in config.json, since users and that library edit them. But
    adapters' own task takes precedence over the files of their base model, which is another folder.

    Args:
        folder: The folder with the files.
        is_own: Whether it is the folder that was opened, not a base model's.
        task: The task in config.json, if any.
        model: The architecture.
        words: The vocabulary.
    """
    if task is not None and (task["kind"] != sentence_transformers.KIND or not is_own):
        return task
    task = {"name": "own", **(task or {}), **sentence_transformers.read_task(folder, model, words)}
    if not sentence_transformers.has_known_pooling(task):
        report(f"{folder}: its vectors need {task['pooling']}, which is not supported; the encoder alone is read")
    return task


def _match_token_types(
    directory: Path, values: Mapping[str, Any], model: ModelConfig, params: dict[str, np.ndarray]
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Drops the model's token types if the folder's tokenizer gives none: all tokens then have type 0."""
    settings = read_optional(directory / TOKENIZER_FILE)
    # AutoTokenizer also falls back to the class in config.json.
    kind = settings.get("tokenizer_class") or values.get("tokenizer_class")
    names = settings.get("model_input_names")
    has_types = "token_type_ids" in names if isinstance(names, list) else not str(kind).startswith(WITHOUT_TYPES)
    if has_types or model.segment_types < 2:
        return model, params
    report(f"{directory}: the tokenizer gives no token types, so those of the model but the first are left out")
    table = {SEGMENT_TABLE: params[SEGMENT_TABLE][:1]}
    return dataclasses.replace(model, segment_types=1), params | table


def named_family(file: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """Looks up the family and the class that config.json names.

    Raises:
        UserError: One of them is unknown.
    """
    family: Family = families.choose(file, "model_type", values.get("model_type"), FAMILIES)
    architectures = values.get("architectures") or [family.base_class]
    class_name = architectures[0] if isinstance(architectures, list) else architectures
    families.choose(file, "architectures", class_name, family.classes)
    return family, class_name


def output_counts(family: Family, class_name: str, weights: SafetensorsFolder) -> dict[str, int]:
    """Returns output sizes by head, for heads in COUNTED that the class requires and the file holds."""
    required = family.classes[class_name]
    names = {part: required[part][0].names[0] for part in COUNTED if part in required}
    return {part: weights.shape(name)[0] for part, name in names.items() if name in weights and weights.shape(name)}


def _further_heads(weights: SafetensorsFolder, expected: Mapping[str, object], family: Family) -> set[str]:
    """Names the tensors outside the encoder that belong to no head of the class."""
    if not weights.leaves_heads_out:
        return set()
    return {name for name in weights if name not in (*expected, *family.copies) and not name.startswith(family.base)}


def _problems(
    file: Path,
    weights: SafetensorsFolder,
    expected: Mapping[str, tuple[int, ...]],
    family: Family,
    further: Collection[str],
) -> Iterator[str]:
    """Describes tensors that are missing, have another shape, or are neither expected, copies nor buffers."""
    for name, shape in expected.items():
        if name not in weights:
            missing = sum(other not in weights for other in expected)
            yield f"{file.parent}: tensor {name} is missing ({missing} in all). Is the model file complete?"
        elif weights.shape(name) != shape:
            got = list(weights.shape(name))
            yield f"{weights.describe(name)} has shape {got}, but {file.name} expects {list(shape)}"
    # With an untied output, a copy is a parameter of its own and expected.
    copies = {copy: original for copy, original in family.copies.items() if copy in weights and copy not in expected}
    known = {*expected, *copies, *family.unread, *further}
    extra = [
        name
        for name in weights
        if name not in known and re.sub(r"(?<=\.)\d+(?=\.)", "{}", name) not in family.buffers  # {}: any layer
    ]
    if extra:
        yield (
            f"{weights.describe(extra[0])} is not part of the architecture in {file.name} ({len(extra)} such tensors). "
            "Correct the file, or remove the tensor"
        )
    # Last, because this reads whole tensors; the checks above read names and shapes only.
    for copy, original in copies.items():
        if not np.array_equal(weights[copy], weights[original]):
            yield (
                f"{weights.describe(copy)} differs from {original}, to which tie_word_embeddings ties it. "
                "Correct config.json"
            )


def report(line: str) -> None:
    """Logs a line about something that reading or writing leaves out."""
    print_note(line)


def _read_labels(file: Path, labelled: Mapping[str, Any], outputs: int) -> list[str]:
    """The outputs' labels in config.json's id2label; LABEL_0 and so on if it has others than the model."""
    if set(labelled) != {str(index) for index in range(outputs)}:
        report(
            f"{file}: id2label has {len(labelled)} labels for {outputs} outputs, so none is used; they are called "
            f"LABEL_0 to LABEL_{outputs - 1}"
        )
        labelled = {str(index): f"LABEL_{index}" for index in range(outputs)}
    labels = [str(labelled[str(index)]) for index in range(outputs)]
    # Two outputs need two names: a repeated label gets its id.
    unique: list[str] = []
    for index, label in enumerate(labels):
        name = label
        while label in labels[:index] and name in (*unique, *labels[index:]):
            name += f"_{index}"
        unique.append(name)
    if unique != labels:
        renamed = ", ".join(f"{index}: {name}" for index, name in enumerate(unique) if name != labels[index])
        report(f"{file}: id2label repeats labels, so these have other names here: {renamed}")
    return unique


def read_task(file: Path, values: Mapping[str, Any], model: ModelConfig, heads: Heads) -> dict[str, Any] | None:
    """Reads a fine-tuned model's task, with the keys of bert_jax/tasks that the format has; None without a task.

    Args:
        file: config.json, with the tokenizer's settings next to it.
        values: Its content.
        model: The architecture.
        heads: The heads, which decide the kind of task.

    Raises:
        UserError: The labels or the problem_type do not fit the model's classifier.
    """
    # The heads decide the kind, since config.json of other programs names none.
    kind, outputs = task_kind(heads), heads.classes or heads.tags
    # The task that bert_jax added, unless another program damaged it.
    stored = values.get(TASK_FIELD)
    task = stored if isinstance(stored, dict) and isinstance(stored.get("name"), str) else {}
    known = task.get("labels")
    if not isinstance(known, list) or len(known) not in (0, outputs) or {type(label) for label in known} - {str}:
        task = {}
    if not kind:  # vectors have no head
        return task if task.get("kind") == sentence_transformers.KIND else None
    problem_type = values.get("problem_type")
    labelled = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(outputs)}
    problem = ""
    if kind == "classification" and problem_type == PROBLEM_TYPES["multilabel"]:
        kind = "multilabel"
    elif heads.classes and problem_type not in (None, PROBLEM_TYPES[kind]):
        problem = f"problem_type is {problem_type!r}, which is not supported with {outputs} outputs"
    if not isinstance(labelled, dict):
        problem = problem or f"id2label is {labelled!r:.60}; expected labels of {outputs} outputs"
    if problem:
        raise UserError(f"{file}: {problem}")
    labels = _read_labels(file, labelled, outputs) if kind in LABELLED else []
    decisions = {}
    if task.get("kind") == kind:
        if not labels or not task["labels"] or not values.get("id2label") or task["labels"] == labels:
            return task
        # These settings of bert_jax also hold for other labels.
        decisions = {key: task[key] for key in DECISIONS if key in task}
        report(f"{file}: id2label has other labels than {TASK_FIELD}; those of id2label are used")
    # transformers truncates a text to model_max_length, which is very large if the tokenizer has no limit.
    settings = read_optional(file.parent / TOKENIZER_FILE)
    limit = settings.get("model_max_length")
    limit = int(limit) if isinstance(limit, int | float) and 0 < limit < sys.maxsize else sys.maxsize
    longest = min(limit, model.max_positions, QUESTION_LENGTH if kind == "question" else sys.maxsize)
    # The format stores no threshold of other programs; 0.5 is the usual one.
    threshold = {"threshold": 0.5} if kind == "multilabel" else {}
    if kind in PROBLEM_TYPES and settings.get("truncation_side") == "left":
        decisions = {"truncation": "left", **decisions}
    return {"name": "own", "kind": kind, "labels": labels, "max_length": longest, **threshold, **decisions}


def task_kind(heads: Heads) -> str:
    """The kind of task for a model's heads; empty for none."""
    if heads.classes:
        return "regression" if heads.classes == 1 else "classification"
    if heads.tags:
        return "token_regression" if heads.tags == 1 else "tagging"
    return "question" if heads.question else "choice" if heads.choices else ""
