"""Reads LoRA adapters in the format of Hugging Face peft, merged into the model that they adapt.

adapter_config.json         rank, scale and targets, and the base model: a Hugging Face folder, or a name of the Hub
adapter_model.safetensors   lora_A [r, in] and lora_B [out, r] of each matrix; whole modules, such as the classifier
task.json                   architectures, labels and task, as in a Hugging Face config.json; only bert_jax writes it
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.interop import huggingface
from bert_jax.interop.family import Family
from bert_jax.interop.huggingface import SafetensorsFolder, read_tensors
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage import hub
from bert_jax.storage.files import read_json

CONFIG_FILE, WEIGHTS_FILE, TASK_FILE = "adapter_config.json", "adapter_model.safetensors", "task.json"
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
# peft's task types, by the end of the name of the class that they stand for.
TASK_TYPES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": "LMHeadModel",
    "FEATURE_EXTRACTION": "Model",  # last, because other classes may end so, too
}
# Fields of adapter_config.json that this reader supports with these values only.
_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("peft_type", ("LORA",)),
    ("bias", ("none", None)),
    ("use_dora", (False, None)),
    ("alpha_pattern", ({}, None)),
    ("lora_bias", (False, None)),
    ("layer_replication", (None,)),
    ("target_parameters", (None,)),
    ("trainable_token_indices", (None,)),
    # Other values change the base model when peft loads it (PiSSA, OLoRA, LoftQ, CorDA), or its forward pass.
    ("init_lora_weights", (True, False, None, "gaussian", "eva", "orthogonal")),
    ("use_qalora", (False, None)),
    ("use_bdlora", (False, None)),
    ("alora_invocation_tokens", (None,)),
    ("kasa_config", (None,)),
    ("velora_config", (None,)),
    ("monteclora_config", (None,)),
)


def is_adapter_folder(path: Path) -> bool:
    """Returns whether a folder holds adapters and no model of its own."""
    return (path / CONFIG_FILE).exists()


def read(directory: Path) -> LoadedModel:
    """Reads adapters and the model that they adapt, merged.

    The base model's heads that the adapters' class lacks are left out, as transformers does, and reported.
    Raises UserError, naming the field or the tensor, for another kind of adapter, for a tensor that does not belong to
    the base model, and where adapter_config.json names neither a folder with that model nor one of the Hub.
    """
    where = directory / CONFIG_FILE
    values = read_json(where)
    for name, known in _FIXED:
        if name in values and values[name] not in known:
            raise UserError(f"{where}: {name} is {values[name]!r}, which is not supported; expected {known[0]!r}")
    base = _base_folder(directory, values.get("base_model_name_or_path"))
    model = huggingface.read_config(base, directory)
    family, architecture = huggingface.named_family(base / huggingface.CONFIG_FILE, model)
    task = read_json(directory / TASK_FILE) if (directory / TASK_FILE).exists() else {}
    if written := task.get("architectures"):  # peft has no task type of multiple choice, for one
        _, architecture = huggingface.named_family(directory / TASK_FILE, {**model, "architectures": written})
    else:
        architecture = _architecture(where, family, architecture, values.get("task_type"))
    model = {**model, "architectures": [architecture], **task}
    tensors = read_tensors(directory / WEIGHTS_FILE)
    weights = AdaptedFolder(base, family, architecture, directory, tensors, values)
    if weights.left_out:
        huggingface.report(f"{base}: not used by {architecture}, left out: {', '.join(weights.left_out)}")
    labels, outputs = model.get("id2label"), huggingface.outputs_of(family, architecture, weights)
    # The labels may be those of the base model, whose classifier was another one.
    if labels and any(count != len(labels) for count in outputs.values()):
        del model["id2label"]
    return huggingface.assemble(directory, base, model, weights)


class AdaptedFolder(SafetensorsFolder):
    """The tensors of a base model with adapters merged and whole modules replaced.

    left_out   the base model's tensors that belong to heads of other architectures alone, which this folder lacks
    """

    def __init__(
        self,
        base: Path,
        family: Family,
        architecture: str,
        directory: Path,
        tensors: Mapping[str, np.ndarray],
        values: Mapping[str, Any],
    ) -> None:
        super().__init__(base, family.prefix)
        own, known = family.head_tensors(architecture), family.head_tensors(*family.architectures)
        self.left_out = sorted((known - own) & self._names.keys())
        for bare in self.left_out:
            del self._names[bare]
        where = directory / WEIGHTS_FILE
        self._where, self._transposed = where, bool(values.get("fan_in_fan_out"))
        self._stabilized, self._alpha = bool(values.get("use_rslora")), _alpha(directory / CONFIG_FILE, values)
        self._pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._replaced: dict[str, np.ndarray] = {}
        for name, tensor in tensors.items():
            bare = name.removeprefix(PREFIX).removeprefix(family.prefix)
            if ".lora_" not in bare:
                self._replaced[bare] = tensor
                continue
            stem = re.sub(r"\.lora_[AB]\.weight$", "", name)
            a, b = tensors.get(stem + LORA_A), tensors.get(stem + LORA_B)
            if stem == name or a is None or b is None:
                raise UserError(f"{where}: tensor {name} is not supported; expected pairs of {LORA_A} and {LORA_B}")
            matrix = f"{stem.removeprefix(PREFIX).removeprefix(family.prefix)}.weight"
            if not super().__contains__(matrix):
                raise UserError(
                    f"{where}: tensor {name} adapts {matrix}, which {base} does not have. Name the model that was "
                    f"adapted by base_model_name_or_path in {directory / CONFIG_FILE}"
                )
            if not (a.ndim == b.ndim == 2 and len(a) == b.shape[1]):
                raise UserError(
                    f"{where}: the adapter of {matrix} has the shapes {a.shape} and {b.shape}; expected [r, in] and "
                    "[out, r] with the same r"
                )
            self._pairs[matrix] = a, b

    def __getitem__(self, bare: str) -> np.ndarray:
        if bare in self._replaced:
            return self._replaced[bare]
        tensor = super().__getitem__(bare)
        if bare not in self._pairs:
            return tensor
        a, b = self._pairs[bare]
        rank = len(a)
        change = (b @ a) * np.float32(self._alpha / (math.sqrt(rank) if self._stabilized else rank))
        change = change.T if self._transposed else change
        if change.shape != tensor.shape:
            raise UserError(f"{self._where}: the adapter of {bare} has shape {change.shape}, not {tensor.shape}")
        return tensor + change

    def __contains__(self, bare: object) -> bool:
        return bare in self._replaced or super().__contains__(bare)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*super().__iter__(), *self._replaced)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def dtype(self) -> str:
        """float32, which holds the merged matrices."""
        return "float32"

    def shape(self, bare: str) -> tuple[int, ...]:
        return self._replaced[bare].shape if bare in self._replaced else super().shape(bare)

    def describe(self, bare: str) -> str:
        return f"{self._where}: tensor {bare}" if bare in self._replaced else super().describe(bare)


def _alpha(where: Path, values: Mapping[str, Any]) -> float:
    alpha = values.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{where}: lora_alpha is {alpha!r:.60}; expected a number")
    return float(alpha)


def _base_folder(directory: Path, name: object) -> Path:
    """Returns the folder of the base model, whose name may be relative to the adapters' folder, or that of a model of
    the Hub."""
    for folder in (Path(str(name)), directory / str(name)) if name else ():
        if (folder / huggingface.CONFIG_FILE).exists():
            return folder
    address = str(hub.model_address(str(name)))
    if not name or not address.startswith(hub.PREFIX):
        raise UserError(
            f"{directory / CONFIG_FILE}: base_model_name_or_path is {name!r}, which is neither the folder of "
            "a model nor a name of the Hugging Face Hub. Set the field to one of them"
        )
    try:
        return Path(hub.named_folder(address))
    except UserError as error:
        raise UserError(f"{directory / CONFIG_FILE}: base_model_name_or_path: {error}") from None


def _architecture(where: Path, family: Family, architecture: str, task_type: object) -> str:
    """Returns the class that the adapters' task type stands for; without one, that of the base model."""
    if task_type is None:
        return architecture
    start = family.base_class.removesuffix("Model")
    known = {kind: start + end for kind, end in TASK_TYPES.items() if start + end in family.architectures}
    if str(task_type) not in known:
        raise UserError(f"{where}: task_type is {task_type!r}; of {family.title}, choose from {', '.join(known)}")
    return known[str(task_type)]
