"""Opens any CHECKPOINT that a command accepts.

`open_checkpoint` is the entry point. Above it are the formats that have no module of their own: workdirs (a step, a
moving average, a mean of several checkpoints) and Google's TensorFlow checkpoints.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath

import numpy as np

import bert_jax.lineage  # noqa: F401 (adds the encoders before the Transformer, whose checkpoints open, too)
from bert_jax.config import ModelConfig
from bert_jax.errors import UserError, install_hint, one_line
from bert_jax.interop import family, huggingface, peft
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.huggingface import BERT_CONFIG_FILE, ONNX_FILE, PROGRAMS_FILE, is_original_bert
from bert_jax.interop.loaded_model import MOVING_AVERAGE, LoadedModel, load_vocabulary
from bert_jax.model import layers, lora
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.basic import NAME as HIDDEN_PROJECTION
from bert_jax.model.heads.config import Heads
from bert_jax.storage import location as storage_location
from bert_jax.storage.files import INCOMPLETE, read_json, refuse_pickle
from bert_jax.storage.hub import named_folder
from bert_jax.storage.location import Location, absolute, check_access, local_folder, location, store_errors
from bert_jax.tokenization.vocabulary import TOKENIZER
from bert_jax.train import workdir as workdir_lib
from bert_jax.train.orbax_io import AVERAGE
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE, read_config, selected_step

# Reads the parameters of a workdir: those of a step, their moving average, or the mean of several checkpoints.


FLAG = "--average"
HELP = (
    "ema (the moving average that the run kept) or last:K (the mean of the workdir's last K checkpoints); "
    "default: the parameters themselves"
)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --average, which every command that takes a CHECKPOINT has."""
    parser.add_argument(FLAG, default="", metavar="ema|last:K", help=HELP)


def read_params(workdir: Location, step: int, average: str, key: str = FLAG) -> dict[str, np.ndarray]:
    """Returns the parameters of a workdir at a step, or an average of them, by path in host memory.

    average is empty, `ema`, or `last:K` for the mean of the K newest checkpoints up to the step
    (Junczys-Dowmunt et al. 2016, section 3; Vaswani et al. 2017, section 6.1, use 5). Errors name it by
    key. Raises UserError for any other value, for a run that kept no moving average, if there are fewer
    than K checkpoints, and for damaged ones.
    """
    if not average:
        return workdir_lib.read_params(workdir, step)
    if average == MOVING_AVERAGE:
        return workdir_lib.read_params(workdir, step, AVERAGE)
    match = re.fullmatch(r"last:([1-9]\d*)", average)
    if not match:
        raise UserError(f"unknown {key} {average!r}; use {MOVING_AVERAGE}, or last:K such as last:5")
    steps = [saved for saved in workdir_lib.saved_steps(workdir) if saved <= step]
    if len(steps) < (wanted := int(match[1])):
        raise UserError(
            f"{key} is {average}, but {workdir} has {len(steps)} checkpoints up to step {step}: {steps}. "
            f"Use last:{len(steps)}, or keep more checkpoints in the run: --config.checkpoint.keep={wanted}"
        )
    return _mean(workdir, steps[-wanted:])


def _mean(workdir: Location, steps: list[int]) -> dict[str, np.ndarray]:
    """Averages checkpoints in float64, with one of them in memory at a time next to the sum."""
    sums: dict[str, np.ndarray] = {}
    for step in steps:
        for path, value in workdir_lib.read_params(workdir, step).items():
            sums[path] = np.add(sums.get(path, 0.0), value, dtype=np.float64)
    # np.asarray, because numpy makes scalars of sums without axes.
    return {path: np.asarray(total / len(steps), np.float32) for path, total in sums.items()}


# Reads models in bert_jax format, which is a workdir.


def read_workdir(
    workdir: Location,
    step: int | None = None,
    average: str = "",
    merged: bool = True,
    average_key: str = FLAG,
) -> LoadedModel:
    """Reads the model of a workdir at a step, or an average of its parameters (checkpoint_average.read_params).

    Without a step it reads the newest checkpoint, or the best one of a run that stopped early. LoRA's adapters are
    merged into the matrices that they adapt, unless `merged` is false; a projection to a teacher's width is left out.
    Raises UserError if there is no such checkpoint, and if parameters, config.json and tokenizer do not agree.
    """
    config = read_config(workdir)
    selected = selected_step(workdir)
    if step is None and (step := selected) is None:
        raise UserError(f"no checkpoint in {workdir}: none has been saved yet. Train first, or give another folder")
    params = read_params(workdir, step, average, average_key)
    _check_params(params, config.model, config.heads, workdir)
    words = load_vocabulary(local_folder(workdir / TOKENIZER), config.model)
    heads = dataclasses.replace(config.heads, hidden_projection=0)  # only training has a teacher
    params = {path: value for path, value in params.items() if path.split(layers.SEPARATOR)[0] != HIDDEN_PROJECTION}
    model = config.model
    if merged:
        model, params = lora.merge(model, params)
    return LoadedModel(
        model,
        heads,
        params,
        words,
        config.task,
        step,
        dtype=config.dtype,
        origin=str(workdir),
        training=config.training,
        data=config.data,
        # result.json reports the parameters of the selected step themselves, not an average of them.
        metrics=_result(workdir) if step == selected and not average else {},
        average=average,
    )


def _check_params(params: Mapping[str, np.ndarray], model: ModelConfig, heads: Heads, workdir: Location) -> None:
    expected = {path: leaf.shape for path, leaf in layers.flatten(abstract_params(model, heads)).items()}
    got = {path: value.shape for path, value in params.items()}
    for path in sorted(set(expected) | set(got)):
        if expected.get(path) != got.get(path):
            raise UserError(
                f"{workdir}: parameter {path} is {got.get(path, 'missing')}, but config.json expects "
                f"{expected.get(path, 'none')}. Was config.json changed or copied from another workdir?"
            )


def _result(workdir: Location) -> dict[str, object]:
    """Returns result.json, or nothing if the run has not finished or the file is damaged."""
    try:
        return dict(json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # only the model card uses it


# Reads Google's original BERT checkpoints: bert_config.json, bert_model.ckpt.*, vocab.txt.
#
# TensorFlow reads the files. Tensor names are those of google-research/bert, modeling.py and run_pretraining.py. The
# names in transformers derive from them by rule, so reading uses the name table of the Hugging Face format with
# TensorFlow's names in place of its own.


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


def read_tensorflow(path: str | Path) -> LoadedModel:
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
    where = prefix.parent / BERT_CONFIG_FILE
    values = read_json(where)
    model = BERT.read_model(where, values)
    tensors = load_tensors(prefix)
    heads = _heads(tensors)
    architecture = "BertForSequenceClassification" if heads.classes else "BertForPreTraining"
    architecture = "BertForQuestionAnswering" if heads.question else architecture
    table = BERT.table(architecture)
    _check(prefix, tensors, family.tensor_shapes(table, model, heads))
    params = family.import_params(table, lambda name: _transposed(name, tensors[_tensorflow_name(name)]), model, heads)
    words = load_vocabulary(prefix.parent, model, BERT_CONFIG_FILE)
    task = huggingface.read_task(where, values, model, heads)
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
    found = sorted(file.with_suffix("") for file in path.glob(f"*{_INDEX}"))
    if path / "bert_model.ckpt" in found:
        return path / "bert_model.ckpt"
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(
            f"{path} holds {BERT_CONFIG_FILE} but no checkpoint (*.ckpt{_INDEX} and its data). Download them too"
        )
    raise UserError(f"{path} holds {len(found)} checkpoints. Give one of them, such as {found[-1]}")


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


def _transposed(name: str, tensor: np.ndarray) -> np.ndarray:
    """Transposes kernels, which are [in, out] in TensorFlow and [out, in] in torch; output_weights already match."""
    return tensor.T if _tensorflow_name(name).endswith("/kernel") else tensor


def _check(prefix: Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless the tensors are those of the model: their names, and their shapes."""
    expected = {
        _tensorflow_name(name): shape[::-1] if _tensorflow_name(name).endswith("/kernel") else shape
        for name, shape in shapes.items()
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


# Opens any CHECKPOINT that a command accepts.


def open_checkpoint(
    path: str | PurePath, average: str = "", merged: bool = True, average_key: str = FLAG
) -> LoadedModel:
    """Opens a workdir, a step in it, a folder written by convert or export, a Hugging Face folder, or adapters of peft.

    hf:NAME or hf:ORG/NAME is a model of the Hugging Face Hub, whose files are kept in its cache.

    LoRA's adapters are merged, except those of a workdir where `merged` is false.

    average selects an average of a workdir's parameters: `ema` or `last:K` (checkpoint_average.read_params); the empty
    string reads the parameters themselves. Errors name it by average_key. Raises UserError if there is no checkpoint,
    if it is incomplete or damaged, and whenever `huggingface.read` or `peft.read` does.
    """
    named = named_folder(path)
    if named is not path:
        return dataclasses.replace(open_checkpoint(named, average, merged, average_key), origin=str(path))
    path = location(path)
    check_access(path)
    with store_errors(path, f"read {path}"):
        found = path.exists()
    if not found:
        raise UserError(f"no checkpoint at {path}. Give a workdir, a step in it, a Hugging Face folder, or hf:NAME")
    if isinstance(path, Path):
        refuse_pickle(path)
    if not path.is_dir():
        raise UserError(f"{path} is a file; a checkpoint is a folder (a workdir, a step in it, a Hugging Face folder)")
    if path.name.endswith(INCOMPLETE):
        raise UserError(f"{path} is incomplete. Run the command that was writing it again")
    step = None
    if absolute(path).parent.name == CHECKPOINTS and path.name.isdecimal():
        path, step = absolute(path).parent.parent, int(path.name)
    if not isinstance(path, Path):
        if step is None and not (path / CHECKPOINTS).is_dir():
            raise UserError(f"{path} is not a workdir with checkpoints. Copy a checkpoint of another kind to a disk")
        return read_workdir(path, step, average, merged, average_key)
    if (path / PROGRAMS_FILE).exists():
        raise UserError(f"{path} holds StableHLO programs, not a checkpoint. Give the one they were exported from")
    if (path / ONNX_FILE).exists() and not list(path.glob("*.safetensors")):
        raise UserError(f"{path} holds an ONNX program, not a checkpoint. Give the one that it was exported from")
    if is_original_bert(path):
        raise UserError(
            f"{path} is in Google's TensorFlow layout. Convert it once: bert-jax convert --input {path} --output DIR"
        )
    if step is not None or (not peft.is_adapter_folder(path) and _is_workdir(path)):
        return read_workdir(path, step, average, merged, average_key)
    if average:
        raise UserError(f"{path} holds a single set of weights, not a workdir. Omit {average_key}")
    return peft.read(path) if peft.is_adapter_folder(path) else huggingface.read(path)


def _is_workdir(path: Location) -> bool:
    """Returns whether config.json is in bert_jax format; the Hugging Face format has a model_type."""
    file = path / CONFIG_FILE
    if not file.exists() and (path / CHECKPOINTS).is_dir():
        raise UserError(f"{path} has checkpoints but no {CONFIG_FILE}. Give the workdir that they belong to")
    return "model_type" not in storage_location.read_json(file)
