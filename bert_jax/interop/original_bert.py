"""Reads Google's original BERT checkpoints: bert_config.json, bert_model.ckpt.*, vocab.txt.

TensorFlow reads the files. Tensors have the names of google-research/bert, modeling.py and run_pretraining.py. The
names in transformers follow from them by rule, so reading uses the Hugging Face name table with TensorFlow's names.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert_jax.errors import UserError, install_hint, one_line
from bert_jax.interop import family, huggingface
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json

CONFIG_FILE = "bert_config.json"
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


def is_original_bert(path: Path) -> bool:
    """Whether a folder, or a checkpoint prefix in a folder, is in Google's format."""
    folder = path if path.is_dir() else path.parent
    return (folder / CONFIG_FILE).exists() and not (folder / huggingface.CONFIG_FILE).exists()


def read(path: str | Path) -> LoadedModel:
    """Reads a folder in Google's format, or one of several checkpoints in it by prefix (DIR/model.ckpt-1000).

    It reads the heads that there are: masked language model, next sentence, run_classifier.py's and run_squad.py's.
    The last two have the task of a Hugging Face folder, so labels are called LABEL_0, LABEL_1, .... GELU is exact, as
    in the first release and in the conversions of transformers; the original code adopted the tanh approximation later
    (bee6030) under the same name.

    Raises:
        UserError: TensorFlow is not installed, the architecture is another one, a tensor is missing, unexpected or has
            another shape, a file is damaged, or the vocabulary does not fit.
    """
    prefix = Path(path)
    if prefix.is_dir():
        prefix = _only_prefix(prefix)
    elif not prefix.with_name(prefix.name + _INDEX).exists():
        raise UserError(f"{path}{_INDEX} does not exist. Give a folder, or the prefix of a TensorFlow checkpoint in it")
    file = prefix.parent / CONFIG_FILE
    values = read_json(file)
    model = BERT.read_model(file, values)
    tensors = load_tensors(prefix)

    next_sentence = _HEADS["cls.seq_relationship.weight"] in tensors
    classes = len(tensors["output_bias"]) if "output_bias" in tensors else 0
    heads = Heads(
        mlm=_HEADS["cls.predictions.bias"] in tensors,
        next_sentence=next_sentence,
        pooler=next_sentence or bool(classes) or "bert/pooler/dense/kernel" in tensors,
        classes=classes,
        question=_HEADS["qa_outputs.weight"] in tensors,
    )
    class_name = "BertForSequenceClassification" if heads.classes else "BertForPreTraining"
    table = BERT.table("BertForQuestionAnswering" if heads.question else class_name)

    # Kernels are [in, out] in TensorFlow and [out, in] in torch.
    shapes = family.tensor_shapes(table, model, heads)
    names = {name: _tensorflow_name(name) for name in shapes}
    turned = {name for name in shapes if names[name].endswith("/kernel")}
    expected = {names[name]: shape[::-1] if name in turned else shape for name, shape in shapes.items()}
    _check_tensors(prefix, tensors, expected)

    def read_tensor(name: str) -> np.ndarray:
        tensor = tensors[names[name]]
        return tensor.T if name in turned else tensor

    params = family.import_params(table, read_tensor, model, heads)
    words = load_vocabulary(prefix.parent, model, CONFIG_FILE)
    task = huggingface.read_task(file, values, model, heads)
    return LoadedModel(model, heads, params, words, task, origin=str(path))


def load_tensors(prefix: Path) -> dict[str, np.ndarray]:
    """Reads a TensorFlow checkpoint as float32 tensors by name, without training state.

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


def _only_prefix(folder: Path) -> Path:
    prefixes = sorted(file.with_suffix("") for file in folder.glob(f"*{_INDEX}"))
    if folder / "bert_model.ckpt" in prefixes:
        return folder / "bert_model.ckpt"
    if not prefixes:
        raise UserError(f"{folder} holds {CONFIG_FILE} but no checkpoint (*.ckpt{_INDEX} and its data). Download both")
    if len(prefixes) > 1:
        raise UserError(f"{folder} holds {len(prefixes)} checkpoints. Give one of them, such as {prefixes[-1]}")
    return prefixes[0]


def _check_tensors(prefix: Path, tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in tensors:
            missing = len(expected.keys() - tensors.keys())
            raise UserError(f"{prefix}: tensor {name} is missing ({missing} in all). Is this a BERT checkpoint?")
        if tensors[name].shape != shape:
            got = list(tensors[name].shape)
            raise UserError(f"{prefix}: tensor {name} has shape {got}, but {CONFIG_FILE} expects {list(shape)}")
    if extra := [name for name in tensors if name not in expected]:
        raise UserError(
            f"{prefix}: tensor {extra[0]} is not part of a BERT with the heads of pretraining, classification or "
            f"question answering ({len(extra)} such tensors)"
        )


def _tensorflow_name(name: str) -> str:
    """Translates a name of the Hugging Face format."""
    if name in _HEADS:
        return _HEADS[name]
    path = re.sub(r"layer/(\d+)", r"layer_\1", name.replace(".", "/"))
    path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
    path = re.sub("embeddings/weight$", "embeddings", path)
    path = re.sub("weight$", "kernel", path)
    return path if path.startswith("cls/") else f"bert/{path}"
