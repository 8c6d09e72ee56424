"""Reads Google's original BERT checkpoints: bert_config.json, bert_model.ckpt.*, vocab.txt.

Tensor names are those of google-research/bert, modeling.py and run_pretraining.py. The names in
transformers derive from them by rule, so reading uses the name table of the Hugging Face format with
TensorFlow's names in place of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert_jax.command import UserError
from bert_jax.interop import huggingface, name_table
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.folder_formats import BERT_CONFIG_FILE
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.interop.tensor_bundle import INDEX, TensorBundle
from bert_jax.model.heads import Heads
from bert_jax.storage.local import read_json

# Optimizer state and counters that training saves along with the parameters.
_TRAINING_STATE = re.compile(r".*/adam_[mv]$|global_step$|.*/(Adam|LAMB\w*)(_1)?$|beta[12]_power$")
# Names that do not follow the rule: Hugging Face -> TensorFlow.
_HEADS = {
    "cls.predictions.bias": "cls/predictions/output_bias",
    "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    "classifier.weight": "output_weights",
    "classifier.bias": "output_bias",
    "qa_outputs.weight": "cls/squad/output_weights",
    "qa_outputs.bias": "cls/squad/output_bias",
}


def read(path: str | Path) -> LoadedModel:
    """Reads a folder in Google's format, or one of several checkpoints in it by prefix (DIR/model.ckpt-1000).

    It reads whichever heads there are: masked language model, next sentence, those of run_classifier.py and
    run_squad.py. The task of the last two is that of a Hugging Face folder, so labels are called LABEL_0, LABEL_1, ....
    GELU is exact, as in the first release and in the conversions of transformers; the original code adopted the tanh
    approximation later (bee6030) under the same name.

    Raises UserError, naming the field or the tensor, for another architecture, a tensor that is missing,
    unexpected or of another shape, damaged files, and a vocabulary that does not fit.
    """
    prefix = _prefix(Path(path))
    where = prefix.parent / BERT_CONFIG_FILE
    values = read_json(where)
    model = BERT.read_model(where, values)
    bundle = TensorBundle(prefix)
    heads = _heads(bundle)
    architecture = "BertForSequenceClassification" if heads.classes else "BertForPreTraining"
    architecture = "BertForQuestionAnswering" if heads.question else architecture
    table = BERT.table(architecture)
    _check(bundle, name_table.tensor_shapes(table, model, heads))
    params = name_table.import_params(
        table, lambda name: _transposed(name, bundle[_tensorflow_name(name)]), model, heads
    )
    words = load_vocabulary(prefix.parent, model, BERT_CONFIG_FILE)
    task = huggingface.read_task(where, values, model, heads)
    return LoadedModel(model, heads, params, words, task, origin=str(path))


def _prefix(path: Path) -> Path:
    if not path.is_dir():
        if not path.with_name(path.name + INDEX).exists():
            raise UserError(
                f"{path}{INDEX} does not exist. Give a folder, or the prefix of a TensorFlow checkpoint in it"
            )
        return path
    found = sorted(file.with_suffix("") for file in path.glob(f"*{INDEX}"))
    if path / "bert_model.ckpt" in found:
        return path / "bert_model.ckpt"
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(
            f"{path} holds {BERT_CONFIG_FILE} but no checkpoint (*.ckpt{INDEX} and its data). Download them too"
        )
    raise UserError(f"{path} holds {len(found)} checkpoints. Give one of them, such as {found[-1]}")


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


def _tensorflow_name(name: str) -> str:
    """Returns the TensorFlow name of a tensor of the Hugging Face format."""
    if name in _HEADS:
        return _HEADS[name]
    path = re.sub(r"layer/(\d+)", r"layer_\1", name.replace(".", "/"))
    path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
    path = re.sub("embeddings/weight$", "embeddings", path)
    path = re.sub("weight$", "kernel", path)
    return path if path.startswith("cls/") else f"bert/{path}"


def _transposed(name: str, tensor: np.ndarray) -> np.ndarray:
    """Transposes kernels, which are [in, out] in TensorFlow and [out, in] in torch; output_weights already match."""
    return tensor.T if _tensorflow_name(name).endswith("/kernel") else tensor


def _check(bundle: TensorBundle, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless every expected tensor exists with its shape, and no others except training state."""
    expected = {
        _tensorflow_name(name): shape[::-1] if _tensorflow_name(name).endswith("/kernel") else shape
        for name, shape in shapes.items()
    }
    for name, shape in expected.items():
        if name not in bundle:
            missing = sum(other not in bundle for other in expected)
            raise UserError(f"{bundle.prefix}: tensor {name} is missing ({missing} in all). Is this a BERT checkpoint?")
        if bundle.shape(name) != shape:
            raise UserError(
                f"{bundle.prefix}: tensor {name} has shape {list(bundle.shape(name))}, but {BERT_CONFIG_FILE} expects "
                f"{list(shape)}"
            )
    extra = [name for name in bundle if name not in expected and not _TRAINING_STATE.match(name)]
    if extra:
        raise UserError(
            f"{bundle.prefix}: tensor {extra[0]} is not part of a BERT with the heads of pretraining, "
            f"classification or question answering ({len(extra)} such tensors)"
        )
