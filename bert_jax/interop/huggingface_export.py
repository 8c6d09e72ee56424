"""Writes the Hugging Face format: config.json, model.safetensors, tokenizer files, model card.

The files are those that transformers 5 writes; transformers itself is not needed. `write` makes a folder; `family_of`
and `architecture_of` find the family and the class whose format holds a model, and raise errors that say why none does.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import processors

from bert_jax.errors import UserError
from bert_jax.interop import family as name_table
from bert_jax.interop import model_card, sentence_transformers
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import ARCHITECTURE_FIELDS, Family, parts_of
from bert_jax.interop.huggingface import (
    CONFIG_FILE,
    PROBLEM_TYPES,
    TASK_FIELD,
    WEIGHTS_FILE,
    report,
    save_tensors,
    task_kind,
)
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import has_pooler
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import atomic_folder, read_json, write_json
from bert_jax.tokenization.engine import template
from bert_jax.tokenization.tokenizer import Tokenizer


def write_sentence_transformer(loaded: LoadedModel, directory: str | Path) -> None:
    """Writes the encoder as a folder that sentence-transformers can open, with the settings of its embedding task.

    A model that was trained for something else has the mean of its tokens, and without what is known of its task.
    Raises UserError as `write` does.
    """
    encoder, settings = sentence_encoder(loaded)
    write(encoder, directory, settings)


def sentence_encoder(loaded: LoadedModel) -> tuple[LoadedModel, Mapping[str, Any]]:
    """Returns the encoder alone, and the settings of its vectors, with the keys of sentence_transformers.write.

    Raises UserError for a pooling that sentence-transformers lacks.
    """
    task = loaded.task if loaded.task and loaded.task["kind"] == sentence_transformers.KIND else None
    if task and not sentence_transformers.has_known_pooling(task):
        raise UserError(f"{loaded.origin} has a pooling that cannot be written: {task['pooling']}. Use --format hf")
    if loaded.task and not task:  # what is known of it are answers and scores of a head that is left out
        loaded = dataclasses.replace(loaded, task=None, metrics={})
    settings = task or {"pooling": "mean", "normalize": False, "max_length": loaded.model.max_positions}
    family = family_of(loaded)
    required, optional = family.architectures[family.base_class]
    # Vectors are pooled from the tokens, and the classes of some families hold no pooler.
    heads = Heads(pooler=loaded.heads.pooler and "pooler" in {**required, **optional})
    held = layers.flatten(abstract_params(loaded.model, heads))
    params = {path: value for path, value in loaded.params.items() if path in held}
    return dataclasses.replace(loaded, heads=heads, params=params), settings


def write(loaded: LoadedModel, directory: str | Path, vectors: Mapping[str, Any] | None = None) -> None:
    """Writes a folder that transformers and `huggingface.read` can open; it appears complete or not at all.

    vectors    the settings of sentence_transformers.write, so that sentence-transformers can open the folder, too

    Raises UserError if the folder exists and, naming the field, for a model that no family's format holds.
    """
    family = family_of(loaded)
    loaded = without_span_boundary(loaded)
    architecture = architecture_of(family, loaded.heads)
    bare = name_table.export_tensors(family.table(architecture), loaded.params, loaded.model)
    tensors = {family.full_name(name, architecture): tensor for name, tensor in bare.items()}
    tensors, dtype = _restore_dtype(tensors, loaded.dtype)
    with atomic_folder(directory) as unfinished:
        parameters = sum(tensor.size for tensor in tensors.values())
        loading = model_card.TRANSFORMERS if vectors is None else model_card.SENTENCE_TRANSFORMERS
        write_description(loaded, unfinished, dtype, parameters, loading, vectors)
        save_tensors(tensors, unfinished / WEIGHTS_FILE)


def write_description(
    loaded: LoadedModel,
    folder: Path,
    dtype: str,
    parameters: int,
    loading: str,
    vectors: Mapping[str, Any] | None = None,
) -> None:
    """Writes all files of a folder but its weights: config.json, the tokenizer's, and README.md, the model card.

    loading is that of model_card.render. With vectors, the settings of sentence_transformers.write, its files take the
    place of the task in config.json. Raises UserError as `write`.
    """
    family = family_of(loaded)
    architecture = architecture_of(family, loaded.heads)
    values = _write_config(loaded, family, architecture) | {"dtype": dtype}
    if vectors is None:
        values |= task_fields(loaded)
    else:
        sentence_transformers.write(vectors, loaded.model.width, folder)
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _save_tokenizer(loaded, folder)
    card = model_card.render(loaded, family, architecture, parameters, loading)
    (folder / "README.md").write_text(card, encoding="utf-8")


def check(loaded: LoadedModel) -> None:
    """Raises UserError, as `write` does, for a model that no family's format holds."""
    heads = dataclasses.replace(loaded.heads, span_boundary=False)  # which `write` leaves out
    family = family_of(loaded)
    _write_config(dataclasses.replace(loaded, heads=heads), family, architecture_of(family, heads))


def describe(loaded: LoadedModel) -> str:
    """Returns a one-line description of a model, which commands print when they finish."""
    plain = Heads()
    heads = [
        item.name for item in dataclasses.fields(Heads) if getattr(loaded.heads, item.name) != getattr(plain, item.name)
    ]
    model = loaded.model
    average = f"; average {loaded.average}" if loaded.average else ""
    held = _holding(loaded)
    title = held[0].title if held else "causal model" if model.causal else "encoder"
    return (
        f"{title}, {model.layers} layers x {model.width}, vocabulary {model.vocab_size}, "
        f"{model.max_positions} positions; heads: {', '.join(heads) or 'none'}{average}"
    )


def _families_for(loaded: LoadedModel) -> list[Family]:
    """Returns the families with this kind of tokenizer, the only difference between XLM-R and RoBERTa."""
    return [
        family for family in FAMILIES.values() if not family.tokenizers or loaded.vocabulary.kind in family.tokenizers
    ]


def _holding(loaded: LoadedModel) -> list[Family]:
    """Returns the families whose format holds a model's architecture, those with a class for its heads first.

    Of several, those come first that have its kind of pooler, also where no head reads it.
    """

    def fits(family: Family) -> tuple[bool, bool]:
        try:
            architecture_of(family, loaded.heads)
        except UserError:
            return False, False
        return True, family.always.get("pooler", loaded.model.pooler) == loaded.model.pooler

    held = [family for family in _families_for(loaded) if not _unsupported_fields(family, loaded)]
    return sorted(held, key=fits, reverse=True)


def family_of(loaded: LoadedModel) -> Family:
    """Returns the family whose format holds a model best. Raises UserError, naming the fields, if none does."""
    if held := _holding(loaded):
        return held[0]
    unsupported = {family.title: _unsupported_fields(family, loaded) for family in _families_for(loaded)}
    nearest = min(unsupported, key=lambda name: len(unsupported[name]))
    fields = ", ".join(f"{name}={getattr(loaded.model, name)!r}" for name in unsupported[nearest])
    raise UserError(
        f"no Hugging Face format holds this architecture; the nearest is {nearest}, except for {fields}. "
        "Use --format orbax, which holds any"
    )


def _unsupported_fields(family: Family, loaded: LoadedModel) -> list[str]:
    """Returns the fields of a model's architecture that the format of a family cannot hold.

    They are the fields that change when config.json is written and read again. The pooler's kind is one of them only
    where the model or the format has a pooler.
    """
    model = loaded.model
    of_format = dataclasses.replace(model, pooler=family.always.get("pooler", model.pooler))
    if not (has_pooler(loaded.heads, model) or has_pooler(loaded.heads, of_format)):
        model = of_format
    differing = [name for name, value in family.always.items() if getattr(model, name) != value]
    try:
        reread = family.read_model(Path(), family.write_model(model, loaded.vocabulary))
    except UserError:  # RoBERTa's positions begin after the padding id, which may exceed all positions
        return differing or ["position_offset"]
    differing += [
        name
        for name in ARCHITECTURE_FIELDS
        if name not in family.always and getattr(reread, name) != getattr(model, name)
    ]
    # Another length of the position table only follows from another position offset.
    return [name for name in differing if name != "max_positions" or differing == ["max_positions"]]


def architecture_of(family: Family, heads: Heads) -> str:
    """Returns the class that holds these heads. Raises UserError if there is none."""
    if unsupported := _unsupported_head(family, heads):
        raise UserError(
            f"the Hugging Face format of {family.title} cannot hold "
            f"heads.{unsupported}={getattr(heads, unsupported)!r}. Use --format orbax, which holds any"
        )
    has = parts_of(heads)
    classes = [
        name
        for name, (required, optional) in family.architectures.items()
        if set(required) <= has <= set(required) | set(optional)
    ]
    if not classes:
        raise UserError(
            f"the model has the heads {', '.join(sorted(has))}, but no {family.title} class of "
            "transformers holds them together. Use --format orbax, which holds any"
        )
    # A class that requires a head describes a model with it better than one that only allows it.
    return max(classes, key=lambda name: len(family.architectures[name].required))


def _unsupported_head(family: Family, heads: Heads) -> str | None:
    """Returns the first field of Heads, other than the parts, that this format cannot hold, or None."""
    held = dataclasses.asdict(Heads()) | family.read_heads(
        Path(), family.write_heads(heads), frozenset(parts_of(heads))
    )
    parts = {name for architecture in family.architectures.values() for part in architecture for name in part}
    return next(
        (name for name, value in dataclasses.asdict(heads).items() if name not in parts and value != held[name]),
        None,
    )


def without_span_boundary(loaded: LoadedModel) -> LoadedModel:
    """Returns the model without the span boundary head, as SpanBERT was published, and reports that it is left out."""
    if not loaded.heads.span_boundary:
        return loaded
    report("the Hugging Face format has no such head, left out: span_boundary_head")
    params = {path: value for path, value in loaded.params.items() if not path.startswith("span_boundary_head/")}
    return dataclasses.replace(loaded, heads=dataclasses.replace(loaded.heads, span_boundary=False), params=params)


def _write_config(loaded: LoadedModel, family: Family, architecture: str) -> dict[str, Any]:
    """Returns the fields of config.json that describe a model without its task.

    Raises UserError for an architecture with which the family's heads mean something else.
    """
    values = family.write_model(loaded.model, loaded.vocabulary) | family.write_heads(loaded.heads)
    values |= {"architectures": [architecture], "model_type": family.model_type}
    try:
        family.read_heads(Path(CONFIG_FILE), values, frozenset(parts_of(loaded.heads)))
    except UserError as error:
        raise UserError(f"{family.title} cannot hold it: {error}. Use --format orbax, which holds any") from None
    return values


def task_fields(loaded: LoadedModel) -> dict[str, Any]:
    """Returns the fields of config.json that describe a model's labels and task, also one of vectors."""
    values: dict[str, Any] = {}
    if outputs := loaded.heads.classes or loaded.heads.tags:
        known = list(loaded.task["labels"]) if loaded.task else []
        labels = known if len(known) == outputs else [f"LABEL_{index}" for index in range(outputs)]
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    if loaded.task:
        values[TASK_FIELD] = dict(loaded.task)
    if loaded.heads.classes:
        kind = (loaded.task or {}).get("kind", "")
        values["problem_type"] = PROBLEM_TYPES[kind if kind in PROBLEM_TYPES else task_kind(loaded.heads)]
    return values


def _restore_dtype(tensors: Mapping[str, np.ndarray], dtype: str) -> tuple[dict[str, np.ndarray], str]:
    """Returns tensors in the dtype they were read from if that loses nothing, else as float32; and the dtype.

    An imported half-precision file is thus exported unchanged, and one that was trained further is not
    rounded.
    """
    narrow = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    if all(np.array_equal(narrow[name].astype(np.float32), tensor) for name, tensor in tensors.items()):
        return narrow, dtype
    return dict(tensors), "float32"


def _save_tokenizer(loaded: LoadedModel, directory: Path) -> None:
    """Writes the tokenizer's files so that transformers builds the sequences that this model expects, and truncates
    them to the tokens that it accepts, or that its task uses.

    The classes of transformers build no token types for the vocabularies of RoBERTa and XLM-R, which use two
    separators, and build them for the others. A model that differs is exported with the general class and its own
    template, or without one if the vocabulary adds no special tokens. model_input_names says whether they are given to
    the model: of the classes, only BERT's do so by themselves.
    """
    words, types = loaded.vocabulary, loaded.model.segment_types > 1
    Tokenizer(words.spec).save(directory)
    settings = directory / sentence_transformers.TOKENIZER_FILE
    longest = min((loaded.task or {}).get("max_length", sys.maxsize), loaded.model.max_positions)
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    write_json(settings, read_json(settings) | {"model_max_length": longest, "model_input_names": inputs})
    if types == (words.pair_separators == 1):
        return
    if words.adds_special_tokens:
        file = directory / "tokenizer.json"
        library = tokenizers.Tokenizer.from_file(str(file))
        cls, sep = (words.roles.cls_token, words.cls_id), (words.roles.sep_token, words.sep_id)
        sequences = template(cls, sep, separators=words.pair_separators, second=1 if types else 0)
        trim = [processors.ByteLevel(trim_offsets=True)] if words.kind == "bpe" else []
        library.post_processor = processors.Sequence([*trim, sequences])
        file.write_text(library.to_str(pretty=True), encoding="utf-8")
    write_json(settings, read_json(settings) | {"tokenizer_class": "PreTrainedTokenizerFast"})
