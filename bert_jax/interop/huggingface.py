"""BERT in the Hugging Face layout, in and out: config.json, model.safetensors, tokenizer files, model card.

Written afresh from the files that transformers 5 writes; transformers itself is never needed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from bert_jax import tokenizer
from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.files import new_folder, read_json, write_json
from bert_jax.interop import bert_names, model_card
from bert_jax.interop.loaded import Loaded
from bert_jax.interop.weights import WEIGHTS_FILE, Weights, narrowed, save
from bert_jax.model.heads import Heads

CONFIG_FILE = "config.json"
TASK_FIELD = "bert_jax_task"  # ours, which transformers carries along: columns, metrics and lengths of a task

# Our field, theirs, and the value that theirs has where a file leaves it out (BertConfig of transformers).
CONFIG_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("vocab_size", "vocab_size", None),
    ("layers", "num_hidden_layers", None),
    ("width", "hidden_size", None),
    ("heads", "num_attention_heads", None),
    ("feed_forward", "intermediate_size", None),
    ("max_positions", "max_position_embeddings", 512),
    ("segment_types", "type_vocab_size", 2),
    ("dropout", "hidden_dropout_prob", 0.1),
    ("attention_dropout", "attention_probs_dropout_prob", 0.1),
    ("layer_norm_epsilon", "layer_norm_eps", 1e-12),
    ("initializer_range", "initializer_range", 0.02),
)
# What their configuration can ask for and this model does not do: the field, and the values that are fine.
FIXED_FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("gelu",)),
    ("position_embedding_type", ("absolute", None)),
    ("is_decoder", (False, None)),
    ("add_cross_attention", (False, None)),
    ("tie_word_embeddings", (True, None)),
    ("pruned_heads", ({}, None)),
)
# The heads without which a file of this architecture is not whole; `classifier` is of classes or of tags.
ARCHITECTURES: dict[str, frozenset[str]] = {
    "BertModel": frozenset(),
    "BertForPreTraining": frozenset({"mlm", "next_sentence"}),
    "BertForMaskedLM": frozenset({"mlm"}),
    "BertForNextSentencePrediction": frozenset({"next_sentence"}),
    "BertForSequenceClassification": frozenset({"classes"}),
    "BertForTokenClassification": frozenset({"tags"}),
}


def read(directory: str | Path) -> Loaded:
    """Opens a BERT in Hugging Face layout.

    The architecture in config.json says which heads there must be; heads whose tensors are there besides are read
    too (many published BertForMaskedLM files hold the next-sentence head). Half-precision tensors are widened.

    Raises UserError, naming the field or the tensor: another or a half-supported architecture; a tensor that is
    missing, extra or of another shape; an output table that is not the token table; a pickle in place of
    safetensors; damaged files; a tokenizer that does not fit.
    """
    directory = Path(directory)
    values = read_json(directory / CONFIG_FILE)
    weights = Weights(directory)
    heads = _heads(directory, values, weights)
    model = _model_config(directory, values)
    params = bert_names.from_theirs(_checked_reader(directory, weights, model, heads), model, heads)
    words = tokenizer.load(directory)
    if words.vocab_size > model.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {words.vocab_size} tokens, config.json says vocab_size "
            f"{model.vocab_size}. Put the tokenizer files that belong to this model there"
        )
    task = _task(directory, values, model, heads)
    return Loaded(model, heads, params, words, task, dtype=weights.dtype, origin=str(directory))


def write(loaded: Loaded, directory: str | Path) -> None:
    """Writes a folder that transformers and `read` open; it appears whole or not at all.

    Raises UserError when the folder exists, or when the model has both a classifier and a tagger, for which the
    layout has one name only.
    """
    architecture = _architecture(loaded.heads)
    prefixed = architecture != "BertModel"
    tensors = {
        f"bert.{name}" if prefixed and name.startswith(("embeddings.", "encoder.", "pooler.")) else name: tensor
        for name, tensor in bert_names.to_theirs(loaded.params, loaded.model).items()
    }
    tensors, dtype = narrowed(tensors, loaded.dtype)
    with new_folder(directory) as unfinished:
        values = _write_config(loaded, architecture) | {"dtype": dtype}
        (unfinished / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _save_tokenizer(loaded.tokenizer, unfinished)
        card = model_card.text(loaded, architecture)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        save(tensors, unfinished / WEIGHTS_FILE)


def _save_tokenizer(words: tokenizer.Tokenizer, directory: Path) -> None:
    """The tokenizer's files, of which transformers makes rows as this model knows them.

    That is one separator between two texts, and token types, whatever the vocabulary: transformers' own classes for
    RoBERTa's and XLM-R's put two, and give no types.
    """
    words.save(directory)
    if words.pair_separators == 1:
        return
    file = directory / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(file))
    cls, sep = words.roles.cls_token, words.roles.sep_token
    template = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, words.cls_id), (sep, words.sep_id)],
    )
    trim = [processors.ByteLevel(trim_offsets=True)] if words.kind == "bpe" else []
    library.post_processor = processors.Sequence([*trim, template])
    file.write_text(library.to_str(pretty=True), encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    of_bert = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    write_json(settings, read_json(settings) | of_bert)


def _heads(directory: Path, values: Mapping[str, Any], weights: Weights) -> Heads:
    where = directory / CONFIG_FILE
    if values.get("model_type") != "bert":
        raise UserError(f"{where}: model_type is {values.get('model_type')!r}; only 'bert' can be read")
    architecture = (values.get("architectures") or ["BertModel"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(f"{where}: architectures is {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    required = ARCHITECTURES[architecture]
    outputs = weights.shape("classifier.weight")[0] if "classifier.weight" in weights else 1
    next_sentence = "next_sentence" in required or weights.has("cls.seq_relationship.")
    return Heads(
        mlm="mlm" in required or weights.has("cls.predictions."),
        next_sentence=next_sentence,
        pooler=weights.has("pooler.") or next_sentence or "classes" in required,
        classes=outputs if "classes" in required else 0,
        tags=outputs if "tags" in required else 0,
    )


def _model_config(directory: Path, values: Mapping[str, Any]) -> ModelConfig:
    where = directory / CONFIG_FILE
    for name, fine in FIXED_FIELDS:
        if (value := values.get(name, fine[0])) not in fine:
            raise UserError(f"{where}: {name} is {value!r}; only {fine[0]!r} can be read")
    found: dict[str, Any] = {}
    for ours, theirs, default in CONFIG_FIELDS:
        value = values.get(theirs, default)
        kind = int if default is None or isinstance(default, int) else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{where}: {theirs} is {value!r}; wanted a number")
        found[ours] = value if kind is int else float(value)
    return ModelConfig(**found)


def _checked_reader(directory: Path, weights: Weights, model: ModelConfig, heads: Heads) -> Any:
    """The weights, once every tensor is known to be there, in its shape, and no other."""
    wanted = bert_names.shapes_of_theirs(model, heads)
    for name, shape in wanted.items():
        if name not in weights:
            missing = sum(other not in weights for other in wanted)
            raise UserError(f"{directory}: tensor {name} is missing ({missing} in all). Is the model file whole?")
        if weights.shape(name) != shape:
            raise UserError(f"{weights.said(name)} is {list(weights.shape(name))}, config.json wants {list(shape)}")
    copies = {
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    extra = [name for name in weights if name not in wanted and name not in buffers and name not in copies]
    if extra:
        raise UserError(
            f"{weights.said(extra[0])} has no place in the architecture of config.json ({len(extra)} such). "
            "Correct `architectures`, or drop the tensor"
        )
    for copy, original in copies.items():
        if copy in weights and not np.array_equal(weights[copy], weights[original]):
            raise UserError(f"{weights.said(copy)} is not {original}; only tied tables can be read")
    return weights.__getitem__


def _task(directory: Path, values: Mapping[str, Any], model: ModelConfig, heads: Heads) -> dict[str, Any] | None:
    """The task of a fine-tuned model, with the keys of bert_jax/tasks/table.py that the layout knows of."""
    outputs = heads.classes or heads.tags
    if not outputs:
        return None
    problem = values.get("problem_type")
    if heads.classes and problem not in (None, "regression" if outputs == 1 else "single_label_classification"):
        raise UserError(f"{directory / CONFIG_FILE}: problem_type is {problem!r} with {outputs} outputs: unknown here")
    names = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(outputs)}
    if set(names) != {str(index) for index in range(outputs)}:
        raise UserError(f"{directory / CONFIG_FILE}: id2label has {len(names)} labels, the classifier {outputs}")
    kind = "tagging" if heads.tags else "regression" if outputs == 1 else "classification"
    ours = values.get(TASK_FIELD)
    if isinstance(ours, dict) and ours.get("kind") == kind and len(ours.get("labels", ())) in (0, outputs):
        return ours
    labels = [] if kind == "regression" else [str(names[str(index)]) for index in range(outputs)]
    return {"name": "own", "kind": kind, "labels": labels, "max_length": min(128, model.max_positions)}


def _architecture(heads: Heads) -> str:
    if heads.classes and heads.tags:
        raise UserError("the model has a classifier and a tagger, but a Hugging Face folder holds one of them only")
    if heads.classes or heads.tags:
        return "BertForSequenceClassification" if heads.classes else "BertForTokenClassification"
    if heads.mlm:
        return "BertForPreTraining" if heads.next_sentence else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if heads.next_sentence else "BertModel"


def _write_config(loaded: Loaded, architecture: str) -> dict[str, Any]:
    values = {theirs: getattr(loaded.model, ours) for ours, theirs, _ in CONFIG_FIELDS}
    values |= {
        "architectures": [architecture],
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "classifier_dropout": None,
        "pad_token_id": loaded.tokenizer.pad_id,
    }
    if outputs := loaded.heads.classes or loaded.heads.tags:
        known = list(loaded.task["labels"]) if loaded.task else []
        labels = known if len(known) == outputs else [f"LABEL_{index}" for index in range(outputs)]
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    if loaded.task and (loaded.heads.classes or loaded.heads.tags):
        values[TASK_FIELD] = dict(loaded.task)
    if loaded.heads.classes:
        values["problem_type"] = "regression" if loaded.heads.classes == 1 else "single_label_classification"
    return values
