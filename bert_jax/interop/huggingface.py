"""Reads the Hugging Face format: config.json, safetensors and tokenizer files, without transformers.

`read` opens a folder. SafetensorsFolder holds its tensors by name, `assemble` builds the model from them, and
`read_task` reads a fine-tuned model's task. Pickles are refused, since reading one can run code.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from rich.console import Console

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop import family as families
from bert_jax.interop import sentence_transformers
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import COUNTED, Family
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.interop.sentence_transformers import TOKENIZER_FILE, read_optional
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json, refuse_pickle

# Files that mark folders in other formats.
PROGRAMS_FILE = "programs.json"  # StableHLO programs
ONNX_FILE = "model.onnx"

CONFIG_FILE = "config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# By their names in safetensors; float32 represents every value of the narrower ones.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}

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


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """A folder's tensors by bare name, read on access and widened to float32.

    Bare names lack the family's prefix, and current names replace legacy ones.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._names: dict[str, tuple[Path, str]] = {}
        for path, name in _tensor_names(directory):
            bare = name.removeprefix(prefix)
            # Names from the first PyTorch conversions, which published files still use.
            bare = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", bare)
            bare = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", bare)
            if bare in self._names:
                raise UserError(
                    f"{path} holds tensor {name} and {self._names[bare][1]}, which are the same tensor. Remove one"
                )
            self._names[bare] = path, name

    def __getitem__(self, bare: str) -> np.ndarray:
        path, name = self._names[bare]
        tensor = open_tensors(path).get_tensor(name)
        if str(tensor.dtype) not in _DTYPES.values():
            known = ", ".join(_DTYPES.values())
            raise UserError(f"{path}: tensor {name} has dtype {tensor.dtype}; expected one of {known}")
        return tensor.astype(np.float32)

    def __contains__(self, bare: object) -> bool:
        return bare in self._names  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dtype(self) -> str:
        """The parameters' dtype; float32 if they differ. Integers are no parameters."""
        stored = {open_tensors(path).get_slice(name).get_dtype() for path, name in self._names.values()}
        dtypes = {_DTYPES.get(dtype, "float32") for dtype in stored - _INTEGERS}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def shape(self, bare: str) -> tuple[int, ...]:
        path, name = self._names[bare]
        return tuple(open_tensors(path).get_slice(name).get_shape())

    def describe(self, bare: str) -> str:
        """The tensor's file and its name there, for errors."""
        path, name = self._names[bare]
        return f"{path}: tensor {name}"


def _tensor_names(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields every tensor's file and name, after checking an index against its files."""
    weights, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if weights.exists():
        yield from ((weights, name) for name in open_tensors(weights).keys())  # noqa: SIM118, not a dict
        return
    if not index.exists():
        for path in sorted(directory.glob("*")):
            refuse_pickle(path)
        raise UserError(f"{directory} holds no {WEIGHTS_FILE}. Is it a Hugging Face model folder?")
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UserError(f"{index}: weight_map does not map each tensor to a file. Download it again")
    names_by_part: dict[str, set[str]] = {}  # a file is opened once, not for each of its tensors
    for name, part in parts.items():
        problem = "" if (directory / part).is_file() else "is missing. Download it too"
        if not problem and part not in names_by_part:
            names_by_part[part] = set(open_tensors(directory / part).keys())
        if not problem and name not in names_by_part[part]:
            problem = "does not hold it. Download both again"
        if problem:
            raise UserError(f"{index} names {part} for tensor {name}, but the file {problem}")
        yield directory / part, name


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file.

    Raises:
        UserError: The file is damaged.
    """
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}). Download it again") from error


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file as transformers does.

    Raises:
        OSError: The disk is full.
    """
    # The library stores the memory of an array, whatever its strides.
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # The library makes files that only their owner can read.
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            code = int(match[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    path.chmod(mode)


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
    # The prefix is known only from the family, so the class is looked up again in `assemble`.
    family, _ = named_family(directory / CONFIG_FILE, values)
    return assemble(directory, directory / CONFIG_FILE, values, SafetensorsFolder(directory, family.prefix))


def read_config(directory: Path, *others: Path) -> dict[str, Any]:
    """Reads config.json, without an embedding task if a folder has files of sentence-transformers.

    These files take precedence, since users and sentence-transformers edit them.
    """
    values = read_json(directory / CONFIG_FILE)
    task = values.get(TASK_FIELD)
    described = any(sentence_transformers.is_folder(folder) for folder in (directory, *others))
    if described and isinstance(task, dict) and task.get("kind") == sentence_transformers.KIND:
        del values[TASK_FIELD]
    return values


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

    # Heads: those that the class requires, and optional ones whose tensors are in the file.
    names = frozenset(family.classes[class_name])
    # One tensor is enough: a missing one of the same head is then an error, not a head that is left out.
    for part, entries in family.optional.items():
        if part not in names and any(name in weights for entry in entries for name in entry.names):
            names |= {part, "pooler"} if part == "next_sentence" else {part}
    fields: dict[str, Any] = {name: 1 if name in COUNTED else True for name in names}
    fields |= output_counts(family, class_name, weights) | family.read_heads(file, values, names)
    heads = Heads(**fields)

    model = family.read_model(file, values)
    # Computing the shapes of millions of layers would take minutes.
    if model.layers > len(weights):
        raise UserError(f"{file}: the model has {model.layers} layers, but its file only {len(weights)} tensors")
    table = family.table(class_name)
    # transformers 4 ties both biases of an untied output, and its files may hold the second one alone.
    twice = [entry.names for entry in table if entry.layout is families.VOCABULARY_TWICE]
    absent = {first: second for first, second in twice if first not in weights and second in weights}
    shapes = families.tensor_shapes(table, model, heads)
    expected = {name: shape for name, shape in shapes.items() if name not in absent}
    if problem := next(_problems(file, weights, expected, family), None):
        raise UserError(problem)
    if unread := [name for name in family.unread if name in weights and name not in expected]:
        report(f"{directory}: not used by the architecture in {file.name}, left out: {', '.join(unread)}")
    params = families.import_params(table, lambda name: weights[absent.get(name, name)], model, heads)
    words = load_vocabulary(directory, model, file.name)
    model, params = _match_token_types(directory, values, model, params)
    task = read_task(file, values, model, heads)
    if settings and task is None:
        task = sentence_transformers.read_task(settings, model, words)
    side = read_optional(directory / TOKENIZER_FILE).get("truncation_side", "right")
    if side not in ("right", (task or {}).get("truncation")):
        report(f"{directory / TOKENIZER_FILE}: truncation_side is {side}, but texts lose their end here")
    return LoadedModel(model, heads, params, words, task, dtype=weights.dtype, origin=str(origin))


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
    """The output sizes of heads in COUNTED that the class requires and the file holds."""
    required = family.classes[class_name]
    names = {part: required[part][0].names[0] for part in COUNTED if part in required}
    return {part: weights.shape(name)[0] for part, name in names.items() if name in weights and weights.shape(name)}


def _problems(
    file: Path, weights: SafetensorsFolder, expected: Mapping[str, tuple[int, ...]], family: Family
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
    known = {*expected, *copies, *family.unread}
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
    for copy, original in copies.items():
        if not np.array_equal(weights[copy], weights[original]):
            yield (
                f"{weights.describe(copy)} differs from {original}, to which tie_word_embeddings ties it. "
                "Correct config.json"
            )


def report(line: str) -> None:
    """Prints a line about something that reading or writing leaves out."""
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


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
    if not isinstance(labelled, dict) or (outputs and set(labelled) != {str(index) for index in range(outputs)}):
        problem = problem or f"id2label is {labelled!r:.60}; expected labels of {outputs} outputs"
    if problem:
        raise UserError(f"{file}: {problem}")
    labels = [str(labelled[str(index)]) for index in range(outputs)] if kind in LABELLED else []
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
    labels = unique
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
