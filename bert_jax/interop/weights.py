"""Reads and writes the tensors of the Hugging Face format: safetensors, and Flax weights in msgpack.

SafetensorsFolder and FlaxFolder hold a folder's tensors by their names in torch. Pickles are refused, since reading one
can run code.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bert_jax.errors import UserError
from bert_jax.storage.files import read_json, refuse_pickle
from bert_jax.storage.location import FLAX_FILE

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TENSORFLOW_FILES = ("tf_model*.h5", "*.ckpt.index", "saved_model.pb")
SETFIT_HEAD = "model_head.pkl"  # the classifier of SetFit, on vectors of an encoder
# By their names in safetensors; float32 represents every value of the narrower ones.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
# How the names of tensors end in torch, by how they end in Flax.
_FLAX_ENDINGS = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """A folder's tensors by bare name, read on access and widened to float32.

    Bare names lack the family's prefix, and current names replace legacy ones.
    """

    # Whether heads that the model's class lacks are left out, as in transformers.
    leaves_heads_out = True

    def __init__(self, directory: Path, prefix: str) -> None:
        self._names: dict[str, tuple[Path, str]] = {}
        for path, name in _tensor_names(directory):
            bare = name.removeprefix(prefix)
            # Names from the first PyTorch conversions, which published files still use.
            bare = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", bare)
            bare = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", bare)
            if bare in self._names:
                raise UserError(
                    f"{path} holds tensor {name} and {self._names[bare][1]}, which are the same tensor. Remove one"
                )
            self._names[bare] = path, name

    def __getitem__(self, bare: str) -> np.ndarray:
        path, name = self._names[bare]
        tensor = open_tensors(path).get_tensor(name)
        if str(tensor.dtype) not in _DTYPES.values():
            known = ", ".join(_DTYPES.values())
            raise UserError(f"{path}: tensor {name} has dtype {tensor.dtype}; expected one of {known}")
        return tensor.astype(np.float32)

    def __contains__(self, bare: object) -> bool:
        return bare in self._names  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dtype(self) -> str:
        """The parameters' dtype; float32 if they differ. Integers are no parameters."""
        stored = {open_tensors(path).get_slice(name).get_dtype() for path, name in self._names.values()}
        dtypes = {_DTYPES.get(dtype, "float32") for dtype in stored - _INTEGERS}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def leave_out(self, names: Iterable[str]) -> None:
        """Removes tensors from the mapping."""
        for name in names:
            self._names.pop(name, None)

    def shape(self, bare: str) -> tuple[int, ...]:
        path, name = self._names[bare]
        return tuple(open_tensors(path).get_slice(name).get_shape())

    def describe(self, bare: str) -> str:
        """The tensor's file and its name there, for errors."""
        path, name = self._names[bare]
        return f"{path}: tensor {name}"


class FlaxFolder(SafetensorsFolder):
    """The tensors of flax_model.msgpack, which holds no code, by their bare names in torch.

    The classes of transformers 4 for Flax name modules as those for torch. Their kernels are [in, out].
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        import flax.serialization  # takes a while to import
        import flax.traverse_util

        path = directory / FLAX_FILE
        try:
            content = flax.serialization.msgpack_restore(path.read_bytes())
            tensors = flax.traverse_util.flatten_dict(content.get("params", content), sep=".")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"{path} is damaged or holds no Flax weights ({error!r:.80}). Download it again") from error
        self._names, self._tensors = {}, {}
        for name, tensor in tensors.items():
            start, _, end = name.rpartition(".")
            bare = f"{start}.{_FLAX_ENDINGS.get(end, end)}".removeprefix(prefix)
            self._names[bare] = path, f"{name} ({bare} in torch)"
            self._tensors[bare] = np.asarray(tensor).T if end == "kernel" else np.asarray(tensor)

    def __getitem__(self, bare: str) -> np.ndarray:
        return self._tensors[bare].astype(np.float32)

    @property
    def dtype(self) -> str:
        dtypes = {str(tensor.dtype) for tensor in self._tensors.values()}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_DTYPES.values()) else "float32"

    def shape(self, bare: str) -> tuple[int, ...]:
        return self._tensors[bare].shape


def has_weights(directory: Path) -> bool:
    """Whether a folder holds weights that open_weights reads."""
    return any((directory / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE, FLAX_FILE))


def open_weights(directory: Path, prefix: str) -> SafetensorsFolder:
    """Opens a folder's safetensors, or its Flax weights if it has no others."""
    if (directory / FLAX_FILE).exists() and not any((directory / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return FlaxFolder(directory, prefix)
    return SafetensorsFolder(directory, prefix)


def _tensor_names(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields every tensor's file and name, after checking an index against its files."""
    weights, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if weights.exists():
        yield from ((weights, name) for name in open_tensors(weights).keys())  # noqa: SIM118, not a dict
        return
    if not index.exists():
        for path in sorted(directory.glob("*")):
            # SetFit's classifier holds no encoder, so the advice to convert it would not help.
            if path.name != SETFIT_HEAD:
                refuse_pickle(path)
        tensorflow = [path.name for pattern in TENSORFLOW_FILES for path in sorted(directory.glob(pattern))]
        if tensorflow:
            raise UserError(
                f"{directory} holds weights of TensorFlow only ({tensorflow[0]}). Convert them once with transformers "
                "4, TensorFlow and torch: CLASS.from_pretrained(FOLDER, from_tf=True).save_pretrained(NEW_FOLDER), by "
                "the CLASS in architectures of config.json"
            )
        raise UserError(f"{directory} holds no {WEIGHTS_FILE}. Is it a Hugging Face model folder?")
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UserError(f"{index}: weight_map does not map each tensor to a file. Download it again")
    names_by_part: dict[str, set[str]] = {}  # a file is opened once, not for each of its tensors
    for name, part in parts.items():
        problem = "" if (directory / part).is_file() else "is missing. Download it too"
        if not problem and part not in names_by_part:
            names_by_part[part] = set(open_tensors(directory / part).keys())
        if not problem and name not in names_by_part[part]:
            problem = "does not hold it. Download both again"
        if problem:
            raise UserError(f"{index} names {part} for tensor {name}, but the file {problem}")
        yield directory / part, name


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file.

    Raises:
        UserError: The file is damaged.
    """
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}). Download it again") from error


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file as transformers does.

    Raises:
        OSError: The disk is full.
    """
    # The library stores the memory of an array, whatever its strides.
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # The library makes files that only their owner can read.
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            code = int(match[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    path.chmod(mode)
