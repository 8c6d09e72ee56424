"""Reads the Hugging Face format: config.json, safetensors and tokenizer files, without transformers.

`read` opens a folder. SafetensorsFolder holds its tensors by name; `assemble` makes the model of them, and
`read_task` the task of a fine-tuned one. Pickles are refused, since reading one can run code.
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
from bert_jax.interop import family as name_table
from bert_jax.interop import sentence_transformers
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import COUNTED, Family
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.interop.sentence_transformers import TOKENIZER_FILE
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json, refuse_pickle

# The files by which other formats of folders are recognized.
BERT_CONFIG_FILE = "bert_config.json"  # of Google's original BERT checkpoints
PROGRAMS_FILE = "programs.json"  # of StableHLO programs
ONNX_FILE = "model.onnx"

CONFIG_FILE = "config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by their names in safetensors
_INTEGERS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
_READABLE = tuple(_DTYPES.values())  # float32 represents every value of the narrower ones

SEGMENT_TABLE = "embeddings/segment/table"
# Tokenizers of transformers that give no token types, unless model_input_names has them.
WITHOUT_TYPES = ("Roberta", "XLMRoberta", "MPNet", "DistilBert", "Camembert")
LABELLED = ("classification", "multilabel", "tagging")
# The problem_type in config.json of each kind of task with a classifier.
PROBLEM_TYPES = {
    "regression": "regression",
    "classification": "single_label_classification",
    "multilabel": "multi_label_classification",
}
# The maximum length of a task that a folder does not describe; of questions as in run_squad.py of google-research/bert.
MAX_LENGTHS = {"question": 384}
TASK_FIELD = "bert_jax_task"  # added by bert_jax and preserved by transformers: columns, metrics and lengths of a task


def is_original_bert(path: Path) -> bool:
    """Returns whether a folder, or the prefix of a checkpoint in a folder, is in Google's format."""
    folder = path if path.is_dir() else path.parent
    return (folder / BERT_CONFIG_FILE).exists() and not (folder / "config.json").exists()


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """The tensors of a folder by bare name, read on access and widened to float32.

    A bare name has no family prefix, and legacy names are replaced by current ones.
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
        with _open(path) as file:
            tensor = file.get_tensor(name)
        if str(tensor.dtype) not in _READABLE:
            raise UserError(f"{path}: tensor {name} has dtype {tensor.dtype}; expected one of {', '.join(_READABLE)}")
        return tensor.astype(np.float32)

    def __contains__(self, bare: object) -> bool:
        return bare in self._names  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dtype(self) -> str:
        """The dtype of all tensors but those of integers, which are no parameters; float32 if they differ."""
        stored = set()
        for path, name in self._names.values():
            with _open(path) as file:
                stored.add(file.get_slice(name).get_dtype())
        dtypes = {_DTYPES.get(dtype, "float32") for dtype in stored if dtype not in _INTEGERS}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def shape(self, bare: str) -> tuple[int, ...]:
        path, name = self._names[bare]
        with _open(path) as file:
            return tuple(file.get_slice(name).get_shape())

    def describe(self, bare: str) -> str:
        """Returns the tensor's file and its name there, for messages."""
        path, name = self._names[bare]
        return f"{path}: tensor {name}"


def _tensor_names(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields the file and the name of each tensor."""
    if (directory / WEIGHTS_FILE).exists():
        yield from ((directory / WEIGHTS_FILE, name) for name in _names(directory / WEIGHTS_FILE))
        return
    if (directory / INDEX_FILE).exists():
        yield from _indexed(directory)
        return
    for path in sorted(directory.glob("*")):
        refuse_pickle(path)
    raise UserError(f"{directory} holds no {WEIGHTS_FILE}. Is it a Hugging Face model folder?")


def _indexed(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields the tensors of an index, after checking that each is in the file that the index names."""
    index = directory / INDEX_FILE
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UserError(f"{index}: weight_map does not map each tensor to a file. Download it again")
    held: dict[str, set[str]] = {}
    for name, part in parts.items():
        if not (directory / part).is_file():
            raise UserError(f"{index} names {part} (for {name}), which is missing. Download it too")
        if part not in held:
            held[part] = set(_names(directory / part))
        if name not in held[part]:
            raise UserError(f"{index} has tensor {name} in {part}, which does not hold it. Download both again")
        yield directory / part, name


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}). Download it again") from error


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file by name, widened to float32. Raises UserError for a missing or damaged file."""
    if not path.is_file():
        raise UserError(f"{path} is missing. Download it next to {path.parent / 'adapter_config.json'}")
    with _open(path) as file:
        return {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118, not a dict


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file as transformers does. Raises OSError for a full disk."""
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # the library makes files that only their owner can read
    try:
        safetensors.numpy.save_file(whole, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            code = int(match[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    path.chmod(mode)


def read(directory: str | Path) -> LoadedModel:
    """Reads a model of any family in `families` in Hugging Face format.

    The architecture in config.json determines which heads there must be. Other heads whose tensors are in
    the file are read, too (many published BertForMaskedLM files hold the next-sentence head).
    Half-precision tensors are widened.

    Raises UserError, naming the field or the tensor, for an unknown or only partly supported
    architecture; a tensor that is missing, unexpected or of another shape; an output table that differs
    from the token table to which it is tied; a pickle instead of safetensors; damaged files; and a
    tokenizer that does not fit the model.
    """
    directory = Path(directory)
    refuse_pickle(directory)
    values = read_config(directory)
    family, _ = named_family(directory / CONFIG_FILE, values)
    return assemble(directory, directory, values, SafetensorsFolder(directory, family.prefix))


def read_config(directory: Path, *others: Path) -> dict[str, Any]:
    """Returns config.json of a folder, without a task of vectors if files of sentence-transformers describe them.

    Those files, in the folder or in one of the others, are the ones that users edit and sentence-transformers writes.
    """
    values = read_json(directory / CONFIG_FILE)
    task = values.get(TASK_FIELD)
    described = any(sentence_transformers.is_folder(folder) for folder in (directory, *others))
    if described and isinstance(task, dict) and task.get("kind") == sentence_transformers.KIND:
        del values[TASK_FIELD]
    return values


def assemble(origin: Path, directory: Path, values: Mapping[str, Any], weights: SafetensorsFolder) -> LoadedModel:
    """Returns the model that config.json (values) describes, with the tensors of `weights`.

    origin      the path that was opened; adapters of sentence-transformers have settings of vectors of their own there
    directory   the folder of config.json and of the tokenizer, as messages name it
    """
    where = directory / CONFIG_FILE
    family, architecture = named_family(where, values)
    settings = next((folder for folder in (origin, directory) if sentence_transformers.is_folder(folder)), None)
    required = [entry for part in family.architectures[architecture].required.values() for entry in part]
    if settings and not all(name in weights for entry in required for name in entry.names):
        architecture = family.base_class  # such folders hold the encoder, whatever the class in config.json
    heads = _read_heads(where, values, family, architecture, weights)
    model = family.read_model(where, values)
    if model.layers > len(weights):
        raise UserError(f"{where}: the model has {model.layers} layers, but its file only {len(weights)} tensors")
    table = family.table(architecture)
    absent = name_table.absent_copies(table, weights)
    shapes = name_table.tensor_shapes(table, model, heads)
    shapes = {name: shape for name, shape in shapes.items() if name not in absent}
    _check_tensors(directory, weights, shapes, family)
    params = name_table.import_params(table, lambda name: weights[absent.get(name, name)], model, heads)
    words = load_vocabulary(directory, model)
    model, params = _as_tokenized(directory, values, model, params)
    task = read_task(where, values, model, heads)
    if settings and task is None:
        task = sentence_transformers.read_task(settings, model, words)
    return LoadedModel(model, heads, params, words, task, dtype=weights.dtype, origin=str(origin))


def _as_tokenized(
    directory: Path, values: Mapping[str, Any], model: ModelConfig, params: dict[str, np.ndarray]
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Returns the model without its token types if the folder's tokenizer gives it none: all tokens then have type 0.

    Its class is that of tokenizer_config.json or else of config.json (values), as for AutoTokenizer. Reports this, and
    a side at which texts are truncated that is not supported.
    """
    settings = _tokenizer_settings(directory)
    if settings.get("truncation_side", "right") != "right":
        side = settings["truncation_side"]
        report(f"{directory / TOKENIZER_FILE}: truncation_side is {side}, but texts lose their end here")
    kind = settings.get("tokenizer_class") or values.get("tokenizer_class")
    names = settings.get("model_input_names")
    has_types = "token_type_ids" in names if isinstance(names, list) else not str(kind).startswith(WITHOUT_TYPES)
    if has_types or model.segment_types < 2:
        return model, params
    report(f"{directory}: the tokenizer gives no token types, so those of the model but the first are left out")
    table = {SEGMENT_TABLE: params[SEGMENT_TABLE][:1]}
    return dataclasses.replace(model, segment_types=1), params | table


def named_family(where: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """Returns the family and the architecture that config.json names."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise UserError(f"{where}: model_type is {model_type!r}; choose from {known}")
    family = FAMILIES[model_type]
    architectures = values.get("architectures") or [family.base_class]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in family.architectures:
        raise UserError(f"{where}: architectures is {architecture!r}; choose from {', '.join(family.architectures)}")
    return family, architecture


def outputs_of(family: Family, architecture: str, weights: SafetensorsFolder) -> dict[str, int]:
    """Returns the number of outputs of each head in COUNTED that the architecture requires and the file holds."""
    required = family.architectures[architecture].required
    names = {part: required[part][0].names[0] for part in COUNTED if part in required}
    return {part: weights.shape(name)[0] for part, name in names.items() if name in weights and weights.shape(name)}


def _read_heads(
    where: Path, values: Mapping[str, Any], family: Family, architecture: str, weights: SafetensorsFolder
) -> Heads:
    """Returns the heads that the architecture requires and the optional ones whose tensors are in the file."""
    required, optional = family.architectures[architecture]
    present = {
        part for part, table in optional.items() if any(name in weights for entry in table for name in entry.names)
    }
    parts = frozenset(required) | present | ({"pooler"} if "next_sentence" in present else frozenset())
    heads: dict[str, Any] = dict.fromkeys(parts, True)
    heads |= dict.fromkeys(parts.intersection(COUNTED), 1) | outputs_of(family, architecture, weights)
    return Heads(**heads, **family.read_heads(where, values, parts))


def _check_tensors(
    directory: Path, weights: SafetensorsFolder, expected: Mapping[str, tuple[int, ...]], family: Family
) -> None:
    """Raises UserError unless every expected tensor exists with its shape, and no others except copies and buffers."""
    for name, shape in expected.items():
        if name not in weights:
            missing = sum(other not in weights for other in expected)
            raise UserError(f"{directory}: tensor {name} is missing ({missing} in all). Is the model file complete?")
        if weights.shape(name) != shape:
            raise UserError(
                f"{weights.describe(name)} has shape {list(weights.shape(name))}, but config.json expects {list(shape)}"
            )
    copies = {copy: original for copy, original in family.copies.items() if copy in weights and copy not in expected}
    unread = [name for name in family.unread if name in weights and name not in expected]
    known = {*expected, *copies, *unread}
    extra = [name for name in weights if name not in known and not family.is_buffer(name)]
    if extra:
        raise UserError(
            f"{weights.describe(extra[0])} is not part of the architecture in config.json ({len(extra)} such "
            "tensors). Correct `architectures`, or remove the tensor"
        )
    for copy, original in copies.items():
        if not np.array_equal(weights[copy], weights[original]):
            raise UserError(
                f"{weights.describe(copy)} differs from {original}, to which tie_word_embeddings ties it. "
                "Correct config.json"
            )
    if unread:
        report(f"{directory}: not used by the architecture in config.json, left out: {', '.join(unread)}")


def report(line: str) -> None:
    """Prints what reading or writing leaves out."""
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def read_task(where: Path, values: Mapping[str, Any], model: ModelConfig, heads: Heads) -> dict[str, Any] | None:
    """Returns the task of a fine-tuned model, with the keys of bert_jax/tasks that the format has; None for others.

    values    the content of the file `where`, config.json; the tokenizer's settings are in the same folder

    Raises UserError for labels, or a kind of problem, that are not those of the model's classifier.
    """
    kind, task = task_kind(heads), values.get(TASK_FIELD)
    if not kind:  # vectors have no head
        if isinstance(task, dict) and task.get("kind") == sentence_transformers.KIND and _is_task(task, 0):
            return task
        return None
    outputs = heads.classes or heads.tags
    problem = values.get("problem_type")
    if kind == "classification" and problem == PROBLEM_TYPES["multilabel"]:
        kind = "multilabel"
    elif heads.classes and problem not in (None, PROBLEM_TYPES[kind]):
        raise UserError(f"{where}: problem_type is {problem!r}, which is not supported with {outputs} outputs")
    labelled = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(outputs)}
    if not isinstance(labelled, dict):
        raise UserError(f"{where}: id2label is {labelled!r}; expected a label for each output")
    if outputs and set(labelled) != {str(index) for index in range(outputs)}:
        raise UserError(f"{where}: id2label has {len(labelled)} labels, but the classifier {outputs}")
    labels = [str(labelled[str(index)]) for index in range(outputs)] if kind in LABELLED else []
    labels = _unique(where, labels)
    decisions = {}  # settings of bert_jax that hold for other labels, too
    if isinstance(task, dict) and task.get("kind") == kind and _is_task(task, outputs):
        if not labels or not task["labels"] or not values.get("id2label") or task["labels"] == labels:
            return task
        decisions = {key: task[key] for key in ("max_length", "threshold", "thresholds") if key in task}
        report(f"{where}: id2label has other labels than {TASK_FIELD}; those of id2label are used")
    # The tokens to which transformers truncates a text; a tokenizer without a limit has a very large number.
    limit = _tokenizer_settings(where.parent).get("model_max_length")
    limit = int(limit) if isinstance(limit, int | float) and 0 < limit < sys.maxsize else sys.maxsize
    longest = min(MAX_LENGTHS.get(kind, model.max_positions), limit, model.max_positions)
    threshold = {"threshold": 0.5} if kind == "multilabel" else {}
    return {"name": "own", "kind": kind, "labels": labels, "max_length": longest, **threshold, **decisions}


def _unique(where: Path, labels: list[str]) -> list[str]:
    """Returns labels of which none repeats an earlier one: a repetition has its id behind it. Reports this."""
    repeated = [index for index, label in enumerate(labels) if label in labels[:index]]
    unique = list(labels)
    for index in repeated:
        while unique[index] in (*unique[:index], *unique[index + 1 :]):
            unique[index] += f"_{index}"
    if repeated:
        renamed = ", ".join(f"{index}: {unique[index]}" for index in repeated)
        report(f"{where}: id2label repeats labels, so these have other names here: {renamed}")
    return unique


def _tokenizer_settings(directory: Path) -> dict[str, Any]:
    return read_json(directory / TOKENIZER_FILE) if (directory / TOKENIZER_FILE).exists() else {}


def task_kind(heads: Heads) -> str:
    """Returns the kind of task that a model's heads serve; empty if they serve none."""
    if heads.classes:
        return "regression" if heads.classes == 1 else "classification"
    if heads.tags:
        return "token_regression" if heads.tags == 1 else "tagging"
    return "question" if heads.question else "choice" if heads.choices else ""


def _is_task(task: Mapping[str, Any], outputs: int) -> bool:
    """Returns whether a task has a name, and a label for each output or none at all."""
    labels = task.get("labels")
    if not isinstance(task.get("name"), str) or not isinstance(labels, list):
        return False
    return len(labels) in (0, outputs) and all(isinstance(label, str) for label in labels)
