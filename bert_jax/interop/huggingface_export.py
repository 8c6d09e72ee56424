"""Writes the Hugging Face format as transformers 5 does: config.json, model.safetensors, tokenizer files, model card.

`write` makes a folder. `family_for` and `class_for` choose a family and a class that hold the model, or explain why
none does.
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
from bert_jax.interop import family as families
from bert_jax.interop import huggingface, model_card, sentence_transformers
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.family import ARCHITECTURE_FIELDS, Family, head_names
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.weights import WEIGHTS_FILE, save_tensors
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import has_pooler
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import atomic_folder, read_json, write_json
from bert_jax.tokenization.engine import portable_json, template
from bert_jax.tokenization.tokenizer import Tokenizer

POSITION_TABLE = "embeddings/position/table"
IDENTITY = "torch.nn.modules.linear.Identity"


def write_sentence_transformer(loaded: LoadedModel, directory: str | Path) -> None:
    """Writes the encoder as a folder for sentence-transformers, with its embedding task's settings.

    Raises:
        UserError: As in `sentence_encoder` and `write`.
    """
    encoder, settings = sentence_encoder(loaded)
    write(encoder, directory, settings)


def sentence_encoder(loaded: LoadedModel) -> tuple[LoadedModel, Mapping[str, Any]]:
    """Selects the encoder alone, and its vectors' settings, with the keys of sentence_transformers.write.

    Without an embedding task, vectors are means of token vectors.

    Raises:
        UserError: sentence-transformers lacks the task's pooling.
    """
    task = loaded.task if loaded.task and loaded.task["kind"] == sentence_transformers.KIND else None
    if task and written_vectors(loaded) is None:
        raise UserError(f"{loaded.origin} has a pooling that cannot be written: {task['pooling']}. Use --format hf")
    # Another task's answers and scores come from a head that is left out.
    if loaded.task and not task:
        loaded = dataclasses.replace(loaded, task=None, metrics={})
    settings = task or {"pooling": "mean", "normalize": False, "max_length": loaded.model.max_positions}
    family = family_for(loaded)
    # Vectors are pooled from the tokens, and the classes of some families hold no pooler.
    heads = Heads(pooler=loaded.heads.pooler and "pooler" in family.parts(family.base_class))
    expected = layers.flatten(abstract_params(loaded.model, heads))
    params = {path: value for path, value in loaded.params.items() if path in expected}
    return dataclasses.replace(loaded, heads=heads, params=params), settings


def written_vectors(loaded: LoadedModel) -> Mapping[str, Any] | None:
    """Returns an embedding model's settings for sentence_transformers.write; None for other models or poolings."""
    task = loaded.task or {}
    known = task.get("kind") == sentence_transformers.KIND and sentence_transformers.has_known_pooling(task)
    return task if known else None


def write(loaded: LoadedModel, directory: str | Path, vectors: Mapping[str, Any] | None = None) -> None:
    """Writes a folder that transformers and `huggingface.read` can open; it appears complete or not at all.

    Args:
        loaded: The model.
        directory: The folder to create.
        vectors: The settings of sentence_transformers.write, with which sentence-transformers can open it, too; None:
            those of a model for vectors.

    Raises:
        UserError: The folder exists, or no family's format holds the model.
    """
    vectors = written_vectors(loaded) if vectors is None else vectors
    family = family_for(loaded)
    loaded = without_span_boundary(loaded)
    class_name = class_for(family, loaded.heads)
    loaded = _after_padding(family, loaded)
    tensors = families.export_tensors(family.table(class_name), loaded.params, loaded.model)
    # Names in the file, which depend on the class.
    tensors = {family.full_name(bare, class_name): tensor for bare, tensor in tensors.items()}
    # The dtype of the imported file, unless values would change: an imported half-precision file is exported unchanged,
    # but parameters that were trained further are not rounded.
    narrow = {name: tensor.astype(jnp.dtype(loaded.dtype)) for name, tensor in tensors.items()}
    dtype = "float32"
    if all(np.array_equal(narrow[name].astype(np.float32), tensor) for name, tensor in tensors.items()):
        tensors, dtype = narrow, loaded.dtype
    count = sum(tensor.size for tensor in tensors.values())
    # This pooler only keeps transformers from adding a random one, so it is not counted.
    if not has_pooler(loaded.heads, loaded.model):
        fitting = huggingface.passing_pooler(family, class_name, loaded.model.width)
        tensors |= {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in fitting.items()}
    loading = model_card.TRANSFORMERS if vectors is None else model_card.SENTENCE_TRANSFORMERS
    with atomic_folder(directory) as unfinished:
        write_description(loaded, unfinished, dtype, count, loading, vectors)
        save_tensors(tensors, unfinished / WEIGHTS_FILE)


def write_description(
    loaded: LoadedModel,
    folder: Path,
    dtype: str,
    parameters: int,
    loading: str | model_card.Loading,
    vectors: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder's files except weights: config.json, the tokenizer, and README.md, the model card.

    Args:
        loaded: The model.
        folder: An existing folder.
        dtype: The parameters' dtype, for config.json.
        parameters: As in model_card.render, like `loading`.
        vectors: As in `write`.

    Raises:
        UserError: No family's format holds the model.
    """
    family = family_for(loaded)
    class_name = class_for(family, loaded.heads)
    loaded = _after_padding(family, loaded)
    values = _config_values(loaded, family, class_name) | {"dtype": dtype} | task_fields(loaded)
    if vectors is not None:
        sentence_transformers.write(vectors, loaded.model.width, folder)
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / huggingface.CONFIG_FILE).write_text(text, encoding="utf-8")
    save_tokenizer(loaded, folder)
    card = model_card.render(loaded, family, class_name, parameters, loading)
    (folder / "README.md").write_text(card, encoding="utf-8")


def check(loaded: LoadedModel) -> None:
    """Checks that a family's format holds a model.

    Raises:
        UserError: As in `write`.
    """
    # `write` leaves the span boundary head out.
    heads = dataclasses.replace(loaded.heads, span_boundary=False)
    family = family_for(loaded)
    _config_values(dataclasses.replace(loaded, heads=heads), family, class_for(family, heads))


def describe(loaded: LoadedModel) -> str:
    """Describes a model in one line, which commands print when they finish."""
    plain, model = Heads(), loaded.model
    heads = [
        item.name for item in dataclasses.fields(Heads) if getattr(loaded.heads, item.name) != getattr(plain, item.name)
    ]
    average = f"; average {loaded.average}" if loaded.average else ""
    families = _suitable_families(loaded)
    title = families[0].title if families else "causal model" if model.causal else "encoder"
    return (
        f"{title}, {model.layers} layers x {model.width}, vocabulary {model.vocab_size}, "
        f"{model.max_positions} positions; heads: {', '.join(heads) or 'none'}{average}"
    )


def _compared_families(loaded: LoadedModel) -> list[tuple[Family, list[str]]]:
    """Lists the families with this kind of tokenizer, and the architecture fields their formats cannot hold."""
    # XLM-R and RoBERTa differ only in the kind of tokenizer.
    families = [item for item in FAMILIES.values() if not item.tokenizers or loaded.vocabulary.kind in item.tokenizers]
    return [(family, _unsupported_fields(family, loaded)) for family in families]


def _suitable_families(loaded: LoadedModel) -> list[Family]:
    """The families whose format holds a model's architecture, the best one first."""

    def fitness(family: Family) -> tuple[bool, bool]:
        try:
            class_for(family, loaded.heads)
        except UserError:
            return False, False
        # Several families may hold it; the kind of pooler, even if no head reads it, tells from which it came.
        return True, family.always.get("pooler", loaded.model.pooler) == loaded.model.pooler

    families = [family for family, unsupported in _compared_families(loaded) if not unsupported]
    return sorted(families, key=fitness, reverse=True)


def family_for(loaded: LoadedModel) -> Family:
    """Chooses the family whose format holds a model best.

    Raises:
        UserError: None does; the error names the fields that the nearest one lacks.
    """
    if families := _suitable_families(loaded):
        return families[0]
    # The family with the fewest differing fields is named, so that the user can change these.
    nearest, unsupported = min(_compared_families(loaded), key=lambda compared: len(compared[1]))
    fields = ", ".join(f"{name}={getattr(loaded.model, name)!r}" for name in unsupported)
    raise UserError(
        f"no Hugging Face format holds this architecture; the nearest is {nearest.title}, except for {fields}. "
        "Use --format orbax, which holds any"
    )


def _after_padding(family: Family, loaded: LoadedModel) -> LoadedModel:
    """Moves the learned positions behind the vocabulary's padding id if the format counts from there.

    The rows before them are unused, e.g. two in a model like RoBERTa whose vocabulary pads by id 0.
    """
    model, first = loaded.model, loaded.vocabulary.pad_id + 1
    if not family.positions_after_padding or model.position_offset in (0, first):
        return loaded
    positions = loaded.params.get(POSITION_TABLE)
    params = loaded.params
    if positions is not None:
        unused = np.zeros((first, positions.shape[1]), positions.dtype)
        params = {**params, POSITION_TABLE: np.concatenate([unused, positions[model.position_offset :]])}
    return dataclasses.replace(loaded, model=dataclasses.replace(model, position_offset=first), params=params)


def _unsupported_fields(family: Family, loaded: LoadedModel) -> list[str]:
    """The architecture's fields that change when config.json is written and read again."""
    model = _after_padding(family, dataclasses.replace(loaded, params={})).model
    # The kind of pooler counts only if the model or the format has one.
    with_its_pooler = dataclasses.replace(model, pooler=family.always.get("pooler", model.pooler))
    if not (has_pooler(loaded.heads, model) or has_pooler(loaded.heads, with_its_pooler)):
        model = with_its_pooler
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


def class_for(family: Family, heads: Heads) -> str:
    """Chooses the transformers class for these heads.

    Raises:
        UserError: No class holds them.
    """
    names = head_names(heads)
    # Fields of Heads that are no head, such as the pooling, must survive the format, too.
    held = dataclasses.asdict(Heads()) | family.read_heads(Path(), family.write_heads(heads), frozenset(names))
    parts = {part for class_name in family.classes for part in family.parts(class_name)}
    values = dataclasses.asdict(heads).items()
    lost = [name for name, value in values if name not in parts and value != held[name]]
    classes = [
        class_name
        for class_name, required in family.classes.items()
        if required.keys() <= names <= family.parts(class_name).keys()
    ]
    if lost or not classes:
        problem = (
            f"the Hugging Face format of {family.title} cannot hold heads.{lost[0]}={getattr(heads, lost[0])!r}"
            if lost
            else f"the model has the heads {', '.join(sorted(names))}, but no {family.title} class of transformers "
            "holds them together"
        )
        raise UserError(f"{problem}. Use --format orbax, which holds any")
    # A class that requires a head describes a model with it better than one that only allows it.
    return max(classes, key=lambda class_name: len(family.classes[class_name]))


def without_span_boundary(loaded: LoadedModel) -> LoadedModel:
    """Drops the span boundary head, as in the published SpanBERT, and reports this."""
    if not loaded.heads.span_boundary:
        return loaded
    huggingface.report("the Hugging Face format has no such head, left out: span_boundary_head")
    params = {path: value for path, value in loaded.params.items() if not path.startswith("span_boundary_head/")}
    return dataclasses.replace(loaded, heads=dataclasses.replace(loaded.heads, span_boundary=False), params=params)


def _config_values(loaded: LoadedModel, family: Family, class_name: str) -> dict[str, Any]:
    """The fields of config.json without a task."""
    values = family.write_model(loaded.model, loaded.vocabulary) | family.write_heads(loaded.heads)
    values |= {"architectures": [class_name], "model_type": family.model_type}
    # Reading refuses a head that would compute another function in transformers, e.g. with another activation.
    try:
        family.read_heads(Path(huggingface.CONFIG_FILE), values, frozenset(head_names(loaded.heads)))
    except UserError as error:
        raise UserError(f"{family.title} cannot hold it: {error}. Use --format orbax, which holds any") from None
    return values


def task_fields(loaded: LoadedModel) -> dict[str, Any]:
    """The fields of config.json for a model's labels and task."""
    values: dict[str, Any] = {}
    if outputs := loaded.heads.classes or loaded.heads.tags:
        labels = list(loaded.task["labels"]) if loaded.task else []
        # Without a label for every output, labels have the default names of transformers.
        if len(labels) != outputs:
            labels = [f"LABEL_{index}" for index in range(outputs)]
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    if loaded.task:
        values[huggingface.TASK_FIELD] = dict(loaded.task)
    if loaded.heads.classes:
        types = huggingface.PROBLEM_TYPES
        kind = (loaded.task or {}).get("kind", "")
        values["problem_type"] = types[kind if kind in types else huggingface.task_kind(loaded.heads)]
    if values.get("problem_type") == huggingface.PROBLEM_TYPES["regression"]:
        # CrossEncoder of sentence-transformers applies a sigmoid to a single output, unless config.json names another
        # activation: under this key since its version 4, and under the second one before.
        values["sentence_transformers"] = {"activation_fn": IDENTITY}
        values["sbert_ce_default_activation_function"] = IDENTITY
    return values


def save_tokenizer(loaded: LoadedModel, directory: Path) -> None:
    """Writes the tokenizer's files so that transformers builds and truncates sequences as this model expects."""
    words, types = loaded.vocabulary, loaded.model.segment_types > 1
    Tokenizer(words.spec).save(directory)
    settings = directory / sentence_transformers.TOKENIZER_FILE
    longest = loaded.model.max_positions
    # Programs cut texts to model_max_length. bert_jax cuts them to the task's length, too, except for taggers, which
    # continue a long sentence in further rows.
    if not loaded.heads.tags:
        longest = min((loaded.task or {}).get("max_length", sys.maxsize), longest)
    # Of the classes in transformers, only BERT's gives token types without model_input_names.
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    values = read_json(settings) | {"model_max_length": longest, "model_input_names": inputs}
    if (loaded.task or {}).get("truncation") == "left":
        values["truncation_side"] = "left"
    # The classes of RoBERTa and XLM-R, whose vocabularies use two separators, build no token types; the others do.
    # Models that differ get the general class with a template of their own.
    differs = types != (words.pair_separators == 1)
    write_json(settings, values | ({"tokenizer_class": "PreTrainedTokenizerFast"} if differs else {}))
    if differs and words.adds_special_tokens:
        file = directory / "tokenizer.json"
        library = tokenizers.Tokenizer.from_file(str(file))
        cls, sep = (words.roles.cls_token, words.cls_id), (words.roles.sep_token, words.sep_id)
        sequences = template(cls, sep, separators=words.pair_separators, second=1 if types else 0)
        trim = [processors.ByteLevel(trim_offsets=True)] if words.kind == "bpe" else []
        library.post_processor = processors.Sequence([*trim, sequences])
        file.write_text(portable_json(library), encoding="utf-8")
