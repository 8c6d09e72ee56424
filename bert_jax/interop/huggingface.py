"""The Hugging Face layout, in and out: config.json, model.safetensors, tokenizer files, model card.

Written afresh from the files that transformers 5 writes; transformers itself is never needed.
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
from bert_jax.interop import model_card, names
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import COUNTED, Family, parts_of
from bert_jax.interop.loaded import Loaded, check_vocabulary
from bert_jax.interop.weights import WEIGHTS_FILE, Weights, narrowed, refuse_pickle, save
from bert_jax.model.heads import Heads
from bert_jax.storage.local import atomic_folder, read_json, write_json

CONFIG_FILE = "config.json"
LABELLED = ("classification", "tagging")
# Of a task that a folder does not tell of; of questions as run_squad.py of google-research/bert.
MAX_LENGTHS = {"question": 384}
TASK_FIELD = "bert_jax_task"  # ours, which transformers carries along: columns, metrics and lengths of a task


def read(directory: str | Path) -> Loaded:
    """Opens a model in Hugging Face layout, of any family of `families`.

    The architecture in config.json says which heads there must be; heads whose tensors are there besides are read
    too (many published BertForMaskedLM files hold the next-sentence head). Half-precision tensors are widened.

    Raises UserError, naming the field or the tensor: another or a half-supported architecture; a tensor that is
    missing, extra or of another shape; an output table that is not the token table; a pickle in place of
    safetensors; damaged files; a tokenizer that does not fit.
    """
    directory = Path(directory)
    refuse_pickle(directory)
    where = directory / CONFIG_FILE
    values = read_json(where)
    family, architecture = _family(where, values)
    weights = Weights(directory, family.prefix)
    heads = _heads(where, values, family, architecture, weights)
    model = family.read_model(where, values)
    if model.layers > len(weights):
        raise UserError(f"{where}: the model has {model.layers} layers, and its file {len(weights)} tensors only")
    table = family.table(architecture)
    _check_tensors(directory, weights, names.shapes_of_theirs(table, model, heads), family)
    params = names.from_theirs(table, weights.__getitem__, model, heads)
    words = tokenizer.load(directory)
    check_vocabulary(directory, words, model)
    task = _task(directory, values, model, heads)
    return Loaded(model, heads, params, words, task, dtype=weights.dtype, origin=str(directory))


def write(loaded: Loaded, directory: str | Path) -> None:
    """Writes a folder that transformers and `read` open; it appears whole or not at all.

    Raises UserError when the folder exists, and for a model that no family's layout holds, naming the field.
    """
    family = _family_of(loaded)
    loaded = _without_span_boundary(loaded)
    architecture = _architecture(family, loaded.heads)
    theirs = names.to_theirs(family.table(architecture), loaded.params, loaded.model)
    tensors = {family.whole_name(name, architecture): tensor for name, tensor in theirs.items()}
    tensors, dtype = narrowed(tensors, loaded.dtype)
    with atomic_folder(directory) as unfinished:
        values = _write_config(loaded, family, architecture) | {"dtype": dtype}
        (unfinished / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _save_tokenizer(loaded.tokenizer, unfinished, types=loaded.model.segment_types > 1)
        parameters = sum(tensor.size for tensor in tensors.values())
        card = model_card.text(loaded, family, architecture, parameters)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        save(tensors, unfinished / WEIGHTS_FILE)


def _save_tokenizer(words: tokenizer.Tokenizer, directory: Path, types: bool) -> None:
    """The tokenizer's files, of which transformers makes rows as this model knows them.

    That is with token types where the model has them: transformers' own classes give none for RoBERTa's and XLM-R's
    vocabularies (those of two separators), and always for the others.
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
    of_model = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"],
    }
    write_json(settings, read_json(settings) | of_model)


def _family(where: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """The family and the architecture that config.json names."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise UserError(f"{where}: model_type is {model_type!r}; only {known} can be read")
    family = FAMILIES[model_type]
    architectures = values.get("architectures") or [family.base_class]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in family.architectures:
        raise UserError(f"{where}: architectures is {architecture!r}; known: {', '.join(family.architectures)}")
    return family, architecture


def _heads(where: Path, values: Mapping[str, Any], family: Family, architecture: str, weights: Weights) -> Heads:
    required, optional = family.architectures[architecture]
    besides = {part for part, table in optional.items() if any(name in weights for one in table for name in one.names)}
    parts = frozenset(required) | besides | ({"pooler"} if "next_sentence" in besides else frozenset())
    found: dict[str, Any] = dict.fromkeys(parts, True)
    for part in parts.intersection(COUNTED):
        tensor = required[part][0].names[0]
        shape = weights.shape(tensor) if tensor in weights else ()
        found[part] = shape[0] if shape else 1
    return Heads(**found, **family.read_heads(where, values, parts))


def _check_tensors(directory: Path, weights: Weights, wanted: Mapping[str, tuple[int, ...]], family: Family) -> None:
    """Raises UserError unless every tensor is there, in its shape, and no other."""
    for name, shape in wanted.items():
        if name not in weights:
            missing = sum(other not in weights for other in wanted)
            raise UserError(f"{directory}: tensor {name} is missing ({missing} in all). Is the model file whole?")
        if weights.shape(name) != shape:
            raise UserError(f"{weights.said(name)} is {list(weights.shape(name))}, config.json wants {list(shape)}")
    copies = {copy: original for copy, original in family.copies.items() if copy in weights and copy not in wanted}
    unread = [name for name in family.unread if name in weights and name not in wanted]
    known = {*wanted, *copies, *unread}
    extra = [name for name in weights if name not in known and not family.is_buffer(name)]
    if extra:
        raise UserError(
            f"{weights.said(extra[0])} has no place in the architecture of config.json ({len(extra)} such). "
            "Correct `architectures`, or drop the tensor"
        )
    for copy, original in copies.items():
        if not np.array_equal(weights[copy], weights[original]):
            raise UserError(
                f"{weights.said(copy)} is not {original}, though tie_word_embeddings is not false. Correct config.json"
            )
    if unread:
        _say(f"{directory}: not used by the architecture of config.json, so left out: {', '.join(unread)}")


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def _task(directory: Path, values: Mapping[str, Any], model: ModelConfig, heads: Heads) -> dict[str, Any] | None:
    """The task of a fine-tuned model, with the keys of bert_jax/tasks/task.py that the layout knows of."""
    kind = _kind(heads)
    if not kind:
        return None
    outputs = heads.classes or heads.tags
    problem = values.get("problem_type")
    if heads.classes and problem not in (None, "regression" if outputs == 1 else "single_label_classification"):
        raise UserError(f"{directory / CONFIG_FILE}: problem_type is {problem!r} with {outputs} outputs: unknown here")
    labelled = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(outputs)}
    if not isinstance(labelled, dict):
        raise UserError(f"{directory / CONFIG_FILE}: id2label is {labelled!r}; wanted a label for each output")
    if outputs and set(labelled) != {str(index) for index in range(outputs)}:
        raise UserError(f"{directory / CONFIG_FILE}: id2label has {len(labelled)} labels, the classifier {outputs}")
    ours = values.get(TASK_FIELD)
    if isinstance(ours, dict) and ours.get("kind") == kind and _is_task(ours, outputs):
        return ours
    labels = [str(labelled[str(index)]) for index in range(outputs)] if kind in LABELLED else []
    longest = MAX_LENGTHS.get(kind, 128)
    return {"name": "own", "kind": kind, "labels": labels, "max_length": min(longest, model.max_positions)}


def _kind(heads: Heads) -> str:
    """The kind of task that a model's heads are of; empty where they are of none."""
    if heads.classes:
        return "regression" if heads.classes == 1 else "classification"
    if heads.tags:
        return "token_regression" if heads.tags == 1 else "tagging"
    return "question" if heads.question else "choice" if heads.choices else ""


def _is_task(ours: Mapping[str, Any], outputs: int) -> bool:
    """Whether it has a name, and a label for each output or none at all."""
    labels = ours.get("labels")
    if not isinstance(ours.get("name"), str) or not isinstance(labels, list):
        return False
    return len(labels) in (0, outputs) and all(isinstance(label, str) for label in labels)


def title(loaded: Loaded) -> str:
    """What a model is called: the family whose layout holds it; where none does, encoder or causal model."""
    held = (one for one in _families_for(loaded) if not one.foreign_fields(loaded.model, loaded.tokenizer))
    return next((one.title for one in held), "causal model" if loaded.model.causal else "encoder")


def _families_for(loaded: Loaded) -> list[Family]:
    """Those that have models with such a tokenizer; it alone parts XLM-R from RoBERTa."""
    return [one for one in FAMILIES.values() if not one.tokenizers or loaded.tokenizer.kind in one.tokenizers]


def _family_of(loaded: Loaded) -> Family:
    """The family whose layout holds a model."""
    foreign: dict[str, list[str]] = {}
    for family in _families_for(loaded):
        foreign[family.title] = family.foreign_fields(loaded.model, loaded.tokenizer)
        if not foreign[family.title]:
            return family
    nearest = min(foreign, key=lambda name: len(foreign[name]))
    fields = ", ".join(f"{name}={getattr(loaded.model, name)!r}" for name in foreign[nearest])
    raise UserError(
        f"no Hugging Face layout holds this architecture: nearest is {nearest}, but for {fields}. "
        "Use --format orbax, which holds any"
    )


def _without_span_boundary(loaded: Loaded) -> Loaded:
    """The model without the head that only its pretraining read, as SpanBERT was published; that it goes is said."""
    if not loaded.heads.span_boundary:
        return loaded
    _say("not in the Hugging Face layout, so left out: span_boundary_head")
    params = {path: value for path, value in loaded.params.items() if not path.startswith("span_boundary_head/")}
    return dataclasses.replace(loaded, heads=dataclasses.replace(loaded.heads, span_boundary=False), params=params)


def _architecture(family: Family, heads: Heads) -> str:
    if foreign := family.foreign_head(heads):
        raise UserError(
            f"the Hugging Face layout of {family.title} has no place for heads.{foreign}={getattr(heads, foreign)!r}. "
            "Use --format orbax, which holds any"
        )
    if found := family.architecture_of(heads):
        return found
    raise UserError(
        f"the model has the heads {', '.join(sorted(parts_of(heads)))}, but a Hugging Face folder of {family.title} "
        "holds one of them only, or none. Use --format orbax, which holds any"
    )


def _write_config(loaded: Loaded, family: Family, architecture: str) -> dict[str, Any]:
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
