"""Reads Google's original BERT checkpoints: bert_config.json, bert_model.ckpt.*, vocab.txt.

TensorFlow reads the files. Tensors are named as in google-research/bert, modeling.py and run_pretraining.py. A rule
translates these names to those in transformers, so all else is as in Hugging Face format.
"""

import re
from pathlib import Path

import numpy as np

from bert_jax.errors import UserError, install_hint, one_line
from bert_jax.interop import huggingface
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.weights import SafetensorsFolder
from bert_jax.storage.files import read_json

CONFIG_FILE = "bert_config.json"
_INDEX = ".index"
# Optimizer state and counters that training saves along with the parameters.
_TRAINING_STATE = re.compile(r".*/adam_[mv]$|global_step$|.*/(Adam|LAMB\w*)(_1)?$|beta[12]_power$")
# How names end: TensorFlow, as a regular expression -> Hugging Face.
_ENDINGS = {
    r"LayerNorm\.gamma$": "LayerNorm.weight",
    r"LayerNorm\.beta$": "LayerNorm.bias",
    r"embeddings$": "embeddings.weight",
    r"kernel$": "weight",
}
# Names that do not follow this rule: TensorFlow -> Hugging Face.
_HEADS = {
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}


def is_original_bert(path: Path) -> bool:
    """Whether a folder, or a checkpoint prefix in a folder, is in Google's format."""
    folder = path if path.is_dir() else path.parent
    return (folder / CONFIG_FILE).exists() and not (folder / huggingface.CONFIG_FILE).exists()


def read(path: str | Path) -> LoadedModel:
    """Reads a folder in Google's format, or one of several checkpoints in it by prefix (DIR/model.ckpt-1000).

    All heads in the file are read: masked language model, next sentence, and those of run_classifier.py and
    run_squad.py. The last two have the task of a Hugging Face folder, so labels are called LABEL_0, LABEL_1, ....
    GELU is exact, as in the first release and in conversions by transformers; the original code later adopted the tanh
    approximation (bee6030) under the same name.

    Raises:
        UserError: TensorFlow is not installed, the architecture is not BERT's, a tensor is missing, unexpected or has
            another shape, a file is damaged, or the vocabulary does not fit.
    """
    prefix, problem = Path(path), ""
    if prefix.is_dir():
        prefixes = sorted(file.with_suffix("") for file in prefix.glob(f"*{_INDEX}"))
        if prefix / "bert_model.ckpt" in prefixes:
            prefixes = [prefix / "bert_model.ckpt"]
        if not prefixes:
            problem = f"holds {CONFIG_FILE} but no checkpoint (*.ckpt{_INDEX} and its data). Download both"
        elif len(prefixes) > 1:
            problem = f"holds {len(prefixes)} checkpoints. Give one of them, such as {prefixes[-1]}"
        else:
            [prefix] = prefixes
    elif not prefix.with_name(prefix.name + _INDEX).exists():
        problem = f"has no file {prefix.name}{_INDEX} next to it. Give a folder, or a TensorFlow checkpoint's prefix"
    if problem:
        raise UserError(f"{path} {problem}")
    values = read_json(prefix.parent / CONFIG_FILE)
    weights = TensorflowCheckpoint(prefix)
    # bert_config.json names no class. The class only decides the task's head; any class may hold the pretraining heads.
    class_name = BERT.base_class
    if "classifier.weight" in weights:
        class_name = "BertForSequenceClassification"
    elif "qa_outputs.weight" in weights:
        class_name = "BertForQuestionAnswering"
    values |= {"model_type": BERT.model_type, "architectures": [class_name]}
    return huggingface.assemble(Path(path), prefix.parent / CONFIG_FILE, values, weights)


class TensorflowCheckpoint(SafetensorsFolder):
    """A TensorFlow checkpoint's tensors by their bare names in Hugging Face format."""

    dtype = "float32"
    leaves_heads_out = False  # the class is a guess from the tensors

    def __init__(self, prefix: Path) -> None:
        self._tensors: dict[str, np.ndarray] = {}
        self._names = {}
        for name, tensor in load_tensors(prefix).items():
            bare = _HEADS.get(name) or re.sub(r"layer_(\d+)", r"layer.\1", name.removeprefix("bert/").replace("/", "."))
            for pattern, replacement in _ENDINGS.items():
                bare = re.sub(pattern, replacement, bare)
            # Kernels are [in, out] in TensorFlow and [out, in] in torch.
            self._tensors[bare] = tensor.T if name.endswith("/kernel") else tensor
            self._names[bare] = prefix, f"{name} ({bare} in transformers)"

    def __getitem__(self, bare: str) -> np.ndarray:
        return self._tensors[bare]

    def shape(self, bare: str) -> tuple[int, ...]:
        return self._tensors[bare].shape


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
