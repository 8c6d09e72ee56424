"""What the sources of the configuration say of each key: its type, its default, and the comment next to it."""

import ast
import dataclasses
import importlib
import inspect
import io
import tokenize
from dataclasses import dataclass

import bert_jax.lineage  # noqa: F401 (adds its encoders to the choices)
from bert_jax.config import MODEL_CHOICES, FinetuneConfig, ModelConfig, ModelOptions, PretrainConfig, TrainConfig


@dataclass(frozen=True)
class Key:
    """A configuration key as `--config.NAME=VALUE` sets it."""

    name: str
    type: str
    default: str
    meaning: str


def pretraining_keys() -> list[Key]:
    """Keys that only pretraining has."""
    return _without(_keys(PretrainConfig), _keys(TrainConfig))


def finetuning_keys() -> list[Key]:
    """Keys that only fine-tuning has, and those that have other defaults there."""
    return _without(_keys(FinetuneConfig), _keys(TrainConfig))


def shared_keys() -> list[Key]:
    """Keys of both, with the defaults of pretraining where these differ; those of `model` are in model_keys."""
    return [key for key in _keys(TrainConfig) if not key.name.startswith("model.")]


def model_keys() -> list[Key]:
    """The keys below `model`; the defaults of the architecture are BERT's, which a preset replaces."""
    own = _fields(ModelOptions, "model.")
    architecture = _fields(ModelConfig, "model.")
    settable = {f"model.{item.name}" for item in dataclasses.fields(ModelOptions)}
    stated = {key.name for key in own}
    return own + [key for key in architecture if key.name in settable - stated]


def _without(keys: list[Key], others: list[Key]) -> list[Key]:
    return [key for key in keys if key not in others]


def _keys(config_class: type, prefix: str = "") -> list[Key]:
    """The keys of a configuration and of those that it contains, with the comments of the class that states each."""
    stated: dict[str, Key] = {}
    for one in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(one):
            stated |= {key.name: key for key in _fields(one, prefix)}
    defaults = config_class()
    keys: list[Key] = []
    for item in dataclasses.fields(config_class):
        value = getattr(defaults, item.name)
        if isinstance(value, ModelOptions):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = dataclasses.asdict(value)
            for key in _keys(type(value), f"{prefix}{item.name}."):
                default = changed[key.name.rpartition(".")[2]]
                keys.append(key if isinstance(default, dict) else dataclasses.replace(key, default=_shown(default)))
        else:
            keys.append(dataclasses.replace(stated[f"{prefix}{item.name}"], default=_shown(value)))
    return keys


def _fields(config_class: type, prefix: str) -> list[Key]:
    """The fields that the source of a class states, in its order."""
    source = inspect.getsource(importlib.import_module(config_class.__module__))
    [body] = [
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == config_class.__name__
    ]
    comments = {
        token.start[0]: token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    keys = []
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        above = node.lineno - 1
        while above in comments and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        numbers = [*range(above + 1, node.lineno), node.end_lineno or node.lineno]
        texts = [comments[number].string.lstrip("# ").strip() for number in numbers if number in comments]
        meaning = " ".join(texts)
        choices = MODEL_CHOICES.get(name, ()) if config_class is ModelConfig else ()
        if not all(choice in meaning for choice in choices):
            meaning = "; ".join(filter(None, [", ".join(choices), meaning]))
        default = "" if node.value is None else ast.unparse(node.value)
        keys.append(Key(prefix + name, ast.unparse(node.annotation).replace("'", ""), _literal(default), meaning))
    return keys


def _literal(source: str) -> str:
    try:
        return _shown(ast.literal_eval(source)) if source else ""
    except ValueError:
        return source


def _shown(value: object) -> str:
    if value in ("", ()):
        return ""
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)
