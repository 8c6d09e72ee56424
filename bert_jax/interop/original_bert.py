"""Google's original checkpoints of BERT, in: bert_config.json, bert_model.ckpt.*, vocab.txt.

The names are those of google-research/bert, modeling.py and run_pretraining.py, from which transformers' are made by
rule; so the way in is by the table of the Hugging Face layout, with their names for its.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert_jax import tokenizer
from bert_jax.command import UserError
from bert_jax.interop import names
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.loaded import Loaded, check_vocabulary
from bert_jax.interop.tensor_bundle import INDEX, TensorBundle
from bert_jax.model.heads import Heads
from bert_jax.storage.local import read_json

CONFIG_FILE = "bert_config.json"
# Slots of the optimizer, and counters, which training leaves beside the parameters.
_OF_TRAINING = re.compile(r".*/adam_[mv]$|global_step$|.*/(Adam|LAMB\w*)(_1)?$|beta[12]_power$")
# What the rule does not give: ours by the Hugging Face layout, theirs.
_HEADS = {
    "cls.predictions.bias": "cls/predictions/output_bias",
    "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    "classifier.weight": "output_weights",
    "classifier.bias": "output_bias",
    "qa_outputs.weight": "cls/squad/output_weights",
    "qa_outputs.bias": "cls/squad/output_bias",
}


def is_original(path: Path) -> bool:
    """Whether a folder, or the prefix of a checkpoint in one, is in this layout."""
    folder = path if path.is_dir() else path.parent
    return (folder / CONFIG_FILE).exists() and not (folder / "config.json").exists()


def read(path: str | Path) -> Loaded:
    """Opens a folder of Google's, or one of several checkpoints in it by its prefix (DIR/model.ckpt-1000).

    Heads are those that are there: masked language model, next sentence, those of run_classifier.py and run_squad.py.
    GELU is exact, as in the code of the first release and in transformers' conversions; that code took the tanh
    approximation later (bee6030), under the same name.

    Raises UserError, naming the field or the tensor, for another architecture, a tensor that is missing, extra or of
    another shape, damaged files, and a vocabulary that does not fit.
    """
    prefix = _prefix(Path(path))
    where = prefix.parent / CONFIG_FILE
    model = BERT.read_model(where, read_json(where))
    bundle = TensorBundle(prefix)
    heads = _heads(bundle)
    architecture = "BertForSequenceClassification" if heads.classes else "BertForPreTraining"
    architecture = "BertForQuestionAnswering" if heads.question else architecture
    table = BERT.table(architecture)
    _check(bundle, names.shapes_of_theirs(table, model, heads))
    params = names.from_theirs(table, lambda name: _turned(name, bundle[_theirs(name)]), model, heads)
    words = tokenizer.load(prefix.parent)
    check_vocabulary(prefix.parent, words, model, said_by=CONFIG_FILE)
    return Loaded(model, heads, params, words, origin=str(path))


def _prefix(path: Path) -> Path:
    if not path.is_dir():
        if not path.with_name(path.name + INDEX).exists():
            raise UserError(f"no {path}{INDEX}. Name a folder, or the prefix of a TensorFlow checkpoint in it")
        return path
    found = sorted(file.with_suffix("") for file in path.glob(f"*{INDEX}"))
    if path / "bert_model.ckpt" in found:
        return path / "bert_model.ckpt"
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{path} holds {CONFIG_FILE} and no checkpoint (*.ckpt{INDEX} and its data). Fetch them too")
    raise UserError(f"{path} holds {len(found)} checkpoints. Name one: {found[-1]}")


def _heads(bundle: TensorBundle) -> Heads:
    next_sentence = _HEADS["cls.seq_relationship.weight"] in bundle
    classes = bundle.shape("output_bias")[0] if "output_bias" in bundle else 0
    return Heads(
        mlm=_HEADS["cls.predictions.bias"] in bundle,
        next_sentence=next_sentence,
        pooler=next_sentence or bool(classes) or "bert/pooler/dense/kernel" in bundle,
        classes=classes,
        question=_HEADS["qa_outputs.weight"] in bundle,
    )


def _theirs(name: str) -> str:
    """Google's name of a tensor of the Hugging Face layout."""
    if name in _HEADS:
        return _HEADS[name]
    path = re.sub(r"layer/(\d+)", r"layer_\1", name.replace(".", "/"))
    path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
    path = re.sub("embeddings/weight$", "embeddings", path)
    path = re.sub("weight$", "kernel", path)
    return path if path.startswith("cls/") else f"bert/{path}"


def _turned(name: str, tensor: np.ndarray) -> np.ndarray:
    """A kernel is [in, out] in TensorFlow and [out, in] in torch; the matrices called output_weights already are."""
    return tensor.T if _theirs(name).endswith("/kernel") else tensor


def _check(bundle: TensorBundle, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless every tensor is there, in its shape, and no other but those of training."""
    expected = {
        _theirs(name): shape[::-1] if _theirs(name).endswith("/kernel") else shape for name, shape in wanted.items()
    }
    for name, shape in expected.items():
        if name not in bundle:
            missing = sum(other not in bundle for other in expected)
            raise UserError(f"{bundle.prefix}: tensor {name} is missing ({missing} in all). Is it a BERT's?")
        if bundle.shape(name) != shape:
            raise UserError(
                f"{bundle.prefix}: tensor {name} is {list(bundle.shape(name))}, {CONFIG_FILE} wants {list(shape)}"
            )
    extra = [name for name in bundle if name not in expected and not _OF_TRAINING.match(name)]
    if extra:
        raise UserError(
            f"{bundle.prefix}: tensor {extra[0]} has no place in a BERT with heads of pretraining, classes or answers "
            f"({len(extra)} such)"
        )
