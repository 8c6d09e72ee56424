"""Reads Google's original BERT checkpoints: bert_config.json, bert_model.ckpt.*, vocab.txt.

TensorFlow reads the files. Tensor names are those of google-research/bert, modeling.py and run_pretraining.py. The
names in transformers derive from them by rule, so reading uses the name table of the Hugging Face format with
TensorFlow's names in place of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert_jax.errors import UserError, install_hint, one_line
from bert_jax.interop import family, huggingface
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.huggingface import BERT_CONFIG_FILE
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json

_INDEX = ".index"
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

    Raises:
        UserError: TensorFlow is not installed, the architecture is another one, a tensor is missing, unexpected or of
            another shape, a file is damaged, or the vocabulary does not fit.
    """
    prefix = _prefix(Path(path))
    file = prefix.parent / BERT_CONFIG_FILE
    values = read_json(file)
    model = BERT.read_model(file, values)
    tensors = load_tensors(prefix)
    heads = _heads(tensors)
    architecture = "BertForSequenceClassification" if heads.classes else "BertForPreTraining"
    architecture = "BertForQuestionAnswering" if heads.question else architecture
    table = BERT.table(architecture)
    _check(prefix, tensors, family.tensor_shapes(table, model, heads))

    def transformers_tensor(name: str) -> np.ndarray:
        tensor = tensors[_tensorflow_name(name)]
        return tensor.T if _is_transposed(name) else tensor

    params = family.import_params(table, transformers_tensor, model, heads)
    words = load_vocabulary(prefix.parent, model, BERT_CONFIG_FILE)
    task = huggingface.read_task(file, values, model, heads)
    return LoadedModel(model, heads, params, words, task, origin=str(path))


def load_tensors(prefix: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a TensorFlow checkpoint as float32, by name, without training state.

    Raises:
        UserError: TensorFlow is not installed, or a file is damaged or missing.
    """
    try:
        import tensorflow as tf
    except ImportError:
        raise UserError(
            f"{prefix} is a TensorFlow checkpoint, which needs TensorFlow, and that is not installed: "
            f"{install_hint('tensorflow')}"
        ) from None
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = [name for name in reader.get_variable_to_shape_map() if not _TRAINING_STATE.match(name)]
        return {name: np.asarray(reader.get_tensor(name), np.float32) for name in names}
    except (tf.errors.OpError, IndexError) as error:  # IndexError: a data file is shorter than the index says
        raise UserError(f"{prefix} is damaged or incomplete ({one_line(str(error))}). Download it again") from error


def _prefix(path: Path) -> Path:
    if not path.is_dir():
        if not path.with_name(path.name + _INDEX).exists():
            raise UserError(
                f"{path}{_INDEX} does not exist. Give a folder, or the prefix of a TensorFlow checkpoint in it"
            )
        return path
    prefixes = sorted(file.with_suffix("") for file in path.glob(f"*{_INDEX}"))
    if path / "bert_model.ckpt" in prefixes:
        return path / "bert_model.ckpt"
    if len(prefixes) == 1:
        return prefixes[0]
    if not prefixes:
        raise UserError(
            f"{path} holds {BERT_CONFIG_FILE} but no checkpoint (*.ckpt{_INDEX} and its data). Download them too"
        )
    raise UserError(f"{path} holds {len(prefixes)} checkpoints. Give one of them, such as {prefixes[-1]}")


def _heads(tensors: Mapping[str, np.ndarray]) -> Heads:
    next_sentence = _HEADS["cls.seq_relationship.weight"] in tensors
    classes = len(tensors["output_bias"]) if "output_bias" in tensors else 0
    return Heads(
        mlm=_HEADS["cls.predictions.bias"] in tensors,
        next_sentence=next_sentence,
        pooler=next_sentence or bool(classes) or "bert/pooler/dense/kernel" in tensors,
        classes=classes,
        question=_HEADS["qa_outputs.weight"] in tensors,
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


def _is_transposed(name: str) -> bool:
    """Kernels are [in, out] in TensorFlow and [out, in] in torch; output_weights already match."""
    return _tensorflow_name(name).endswith("/kernel")


def _check(prefix: Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless the tensors are those of the model: their names, and their shapes."""
    expected = {
        _tensorflow_name(name): shape[::-1] if _is_transposed(name) else shape for name, shape in shapes.items()
    }
    for name, shape in expected.items():
        if name not in tensors:
            missing = len(expected.keys() - tensors.keys())
            raise UserError(f"{prefix}: tensor {name} is missing ({missing} in all). Is this a BERT checkpoint?")
        if tensors[name].shape != shape:
            raise UserError(
                f"{prefix}: tensor {name} has shape {list(tensors[name].shape)}, but {BERT_CONFIG_FILE} expects "
                f"{list(shape)}"
            )
    extra = [name for name in tensors if name not in expected]
    if extra:
        raise UserError(
            f"{prefix}: tensor {extra[0]} is not part of a BERT with the heads of pretraining, classification or "
            f"question answering ({len(extra)} such tensors)"
        )
