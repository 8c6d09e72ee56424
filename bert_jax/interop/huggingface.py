"""Reads and writes the Hugging Face format: config.json, model.safetensors, tokenizer files, model card.

This follows the files that transformers 5 writes, without depending on transformers.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console
from tokenizers import processors

from bert_jax import tokenizer
from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop import model_card, name_table
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import COUNTED, Family, parts_of
from bert_jax.interop.loaded_model import LoadedModel, check_vocabulary
from bert_jax.interop.safetensors_folder import (
    WEIGHTS_FILE,
    SafetensorsFolder,
    refuse_pickle,
    restore_dtype,
    save_tensors,
)
from bert_jax.model.heads import Heads
from bert_jax.storage.local import atomic_folder, read_json, write_json

CONFIG_FILE = "config.json"
LABELLED = ("classification", "tagging")
# The maximum length of a task that a folder does not describe; of questions as in run_squad.py of google-research/bert.
MAX_LENGTHS = {"question": 384}
TASK_FIELD = "bert_jax_task"  # added by bert_jax and preserved by transformers: columns, metrics and lengths of a task


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
    where = directory / CONFIG_FILE
    values = read_json(where)
    family, architecture = _family(where, values)
    weights = SafetensorsFolder(directory, family.prefix)
    heads = _read_heads(where, values, family, architecture, weights)
    model = family.read_model(where, values)
    if model.layers > len(weights):
        raise UserError(f"{where}: the model has {model.layers} layers, but its file only {len(weights)} tensors")
    table = family.table(architecture)
    _check_tensors(directory, weights, name_table.tensor_shapes(table, model, heads), family)
    params = name_table.import_params(table, weights.__getitem__, model, heads)
    words = tokenizer.load(directory)
    check_vocabulary(directory, words, model)
    task = _task(directory, values, model, heads)
    return LoadedModel(model, heads, params, words, task, dtype=weights.dtype, origin=str(directory))


def write(loaded: LoadedModel, directory: str | Path) -> None:
    """Writes a folder that transformers and `read` can open; it appears complete or not at all.

    Raises UserError if the folder exists and, naming the field, for a model that no family's format holds.
    """
    family = _family_of(loaded)
    loaded = _without_span_boundary(loaded)
    architecture = _architecture(family, loaded.heads)
    bare = name_table.export_tensors(family.table(architecture), loaded.params, loaded.model)
    tensors = {family.full_name(name, architecture): tensor for name, tensor in bare.items()}
    tensors, dtype = restore_dtype(tensors, loaded.dtype)
    with atomic_folder(directory) as unfinished:
        values = _write_config(loaded, family, architecture) | {"dtype": dtype}
        (unfinished / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _save_tokenizer(loaded.tokenizer, unfinished, types=loaded.model.segment_types > 1)
        parameters = sum(tensor.size for tensor in tensors.values())
        card = model_card.render(loaded, family, architecture, parameters)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        save_tensors(tensors, unfinished / WEIGHTS_FILE)


def _save_tokenizer(words: tokenizer.Tokenizer, directory: Path, types: bool) -> None:
    """Writes the tokenizer's files so that transformers builds the sequences that this model expects.

    `types` says whether the model has token types. The classes of transformers give none for the
    vocabularies of RoBERTa and XLM-R, which use two separators, and always give them for the others. A
    model that differs is exported with the general class and its own template.
    """
    words.save(directory)
    if types == (words.pair_separators == 1):
        return
    file = directory / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(file))
    cls, sep = words.roles.cls_token, words.roles.sep_token
    second = 1 if types else 0
    template = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {' '.join([f'{sep}:0'] * words.pair_separators)} $B:{second} {sep}:{second}",
        special_tokens=[(cls, words.cls_id), (sep, words.sep_id)],
    )
    trim = [processors.ByteLevel(trim_offsets=True)] if words.kind == "bpe" else []
    library.post_processor = processors.Sequence([*trim, template])
    file.write_text(library.to_str(pretty=True), encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    generic = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"],
    }
    write_json(settings, read_json(settings) | generic)


def _family(where: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
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


def _read_heads(
    where: Path, values: Mapping[str, Any], family: Family, architecture: str, weights: SafetensorsFolder
) -> Heads:
    """Returns the heads that the architecture requires and the optional ones whose tensors are in the file."""
    required, optional = family.architectures[architecture]
    present = {part for part, table in optional.items() if any(name in weights for one in table for name in one.names)}
    parts = frozenset(required) | present | ({"pooler"} if "next_sentence" in present else frozenset())
    found: dict[str, Any] = dict.fromkeys(parts, True)
    for part in parts.intersection(COUNTED):
        tensor = required[part][0].names[0]
        shape = weights.shape(tensor) if tensor in weights else ()
        found[part] = shape[0] if shape else 1
    return Heads(**found, **family.read_heads(where, values, parts))


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
        _report(f"{directory}: not used by the architecture in config.json, left out: {', '.join(unread)}")


def _report(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def _task(directory: Path, values: Mapping[str, Any], model: ModelConfig, heads: Heads) -> dict[str, Any] | None:
    """Returns the task of a fine-tuned model, with the keys of bert_jax/tasks that the format has; None for others."""
    kind = _kind(heads)
    if not kind:
        return None
    outputs = heads.classes or heads.tags
    problem = values.get("problem_type")
    if heads.classes and problem not in (None, "regression" if outputs == 1 else "single_label_classification"):
        raise UserError(
            f"{directory / CONFIG_FILE}: problem_type is {problem!r}, which is not supported with {outputs} outputs"
        )
    labelled = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(outputs)}
    if not isinstance(labelled, dict):
        raise UserError(f"{directory / CONFIG_FILE}: id2label is {labelled!r}; expected a label for each output")
    if outputs and set(labelled) != {str(index) for index in range(outputs)}:
        raise UserError(f"{directory / CONFIG_FILE}: id2label has {len(labelled)} labels, but the classifier {outputs}")
    task = values.get(TASK_FIELD)
    if isinstance(task, dict) and task.get("kind") == kind and _is_task(task, outputs):
        return task
    labels = [str(labelled[str(index)]) for index in range(outputs)] if kind in LABELLED else []
    longest = MAX_LENGTHS.get(kind, 128)
    return {"name": "own", "kind": kind, "labels": labels, "max_length": min(longest, model.max_positions)}


def _kind(heads: Heads) -> str:
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


def title(loaded: LoadedModel) -> str:
    """Returns the title of the family whose format holds a model; without one, "encoder" or "causal model"."""
    held = (one for one in _families_for(loaded) if not one.unsupported_fields(loaded.model, loaded.tokenizer))
    return next((one.title for one in held), "causal model" if loaded.model.causal else "encoder")


def _families_for(loaded: LoadedModel) -> list[Family]:
    """Returns the families with this kind of tokenizer, the only difference between XLM-R and RoBERTa."""
    return [one for one in FAMILIES.values() if not one.tokenizers or loaded.tokenizer.kind in one.tokenizers]


def _family_of(loaded: LoadedModel) -> Family:
    """Returns the first family whose format holds a model. Raises UserError, naming the fields, if none does."""
    unsupported: dict[str, list[str]] = {}
    for family in _families_for(loaded):
        unsupported[family.title] = family.unsupported_fields(loaded.model, loaded.tokenizer)
        if not unsupported[family.title]:
            return family
    nearest = min(unsupported, key=lambda name: len(unsupported[name]))
    fields = ", ".join(f"{name}={getattr(loaded.model, name)!r}" for name in unsupported[nearest])
    raise UserError(
        f"no Hugging Face format holds this architecture; the nearest is {nearest}, except for {fields}. "
        "Use --format orbax, which holds any"
    )


def _without_span_boundary(loaded: LoadedModel) -> LoadedModel:
    """Returns the model without the span boundary head, as SpanBERT was published, and reports that it is left out."""
    if not loaded.heads.span_boundary:
        return loaded
    _report("the Hugging Face format has no such head, left out: span_boundary_head")
    params = {path: value for path, value in loaded.params.items() if not path.startswith("span_boundary_head/")}
    return dataclasses.replace(loaded, heads=dataclasses.replace(loaded.heads, span_boundary=False), params=params)


def _architecture(family: Family, heads: Heads) -> str:
    """Returns the class that holds these heads. Raises UserError if there is none."""
    if unsupported := family.unsupported_head(heads):
        raise UserError(
            f"the Hugging Face format of {family.title} cannot hold "
            f"heads.{unsupported}={getattr(heads, unsupported)!r}. Use --format orbax, which holds any"
        )
    if found := family.architecture_of(heads):
        return found
    raise UserError(
        f"the model has the heads {', '.join(sorted(parts_of(heads)))}, but no {family.title} class of "
        "transformers holds them together. Use --format orbax, which holds any"
    )


def _write_config(loaded: LoadedModel, family: Family, architecture: str) -> dict[str, Any]:
    values = family.write_model(loaded.model, loaded.tokenizer) | family.write_heads(loaded.heads)
    values |= {"architectures": [architecture], "model_type": family.model_type}
    if outputs := loaded.heads.classes or loaded.heads.tags:
        known = list(loaded.task["labels"]) if loaded.task else []
        labels = known if len(known) == outputs else [f"LABEL_{index}" for index in range(outputs)]
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    if loaded.task and _kind(loaded.heads):
        values[TASK_FIELD] = dict(loaded.task)
    if loaded.heads.classes:
        values["problem_type"] = "regression" if loaded.heads.classes == 1 else "single_label_classification"
    return values
