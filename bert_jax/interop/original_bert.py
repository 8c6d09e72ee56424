"""Reads Google's original BERT checkpoints: bert_config.json, bert_model.ckpt.*, vocab.txt.

TensorFlow reads the files. Tensors have the names of google-research/bert, modeling.py and run_pretraining.py, which
translate to the names in transformers by rule, so that the rest is the same as in Hugging Face format.
"""

import re
from pathlib import Path

import numpy as np

from bert_jax.errors import UserError, install_hint, one_line
from bert_jax.interop import huggingface
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.huggingface import SafetensorsFolder
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage.files import read_json

CONFIG_FILE = "bert_config.json"
_INDEX = ".index"
# Optimizer state and counters that training saves along with the parameters.
_TRAINING_STATE = re.compile(r".*/adam_[mv]$|global_step$|.*/(Adam|LAMB\w*)(_1)?$|beta[12]_power$")
# Names that do not follow the rule: TensorFlow -> Hugging Face.
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
    values = read_json(prefix.parent / CONFIG_FILE)
    weights = TensorflowCheckpoint(prefix)
    # The class with the head of a task; any class may hold the pretraining heads, too.
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

    def __init__(self, prefix: Path) -> None:
        self._tensors: dict[str, np.ndarray] = {}
        self._names = {}
        for name, tensor in load_tensors(prefix).items():
            # Kernels are [in, out] in TensorFlow and [out, in] in torch.
            bare = _HEADS.get(name) or _bare_name(name)
            self._tensors[bare] = tensor.T if name.endswith("/kernel") else tensor
            self._names[bare] = prefix, f"{name} ({bare} in transformers)"

    def __getitem__(self, bare: str) -> np.ndarray:
        return self._tensors[bare]

    def shape(self, bare: str) -> tuple[int, ...]:
        return self._tensors[bare].shape


def load_tensors(prefix: Path) -> dict[str, np.ndarray]:
    """Reads a TensorFlow checkpoint as float32 tensors by name, without training state.

    Raises UserError if TensorFlow is not installed, or a file is damaged or missing.
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


def _bare_name(name: str) -> str:
    bare = re.sub(r"layer_(\d+)", r"layer.\1", name.removeprefix("bert/").replace("/", "."))
    bare = bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    bare = re.sub(r"embeddings$", "embeddings.weight", bare)
    return re.sub(r"kernel$", "weight", bare)
