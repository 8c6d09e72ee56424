"""The tensors of a Hugging Face folder: safetensors in one file or several, never a pickle."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from bert_jax.command import UserError
from bert_jax.storage.local import read_json

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors calls them
_WIDENED = tuple(_DTYPES.values())  # each value of the narrow ones is a float32


class Weights(Mapping[str, np.ndarray]):
    """Tensors of a folder by bare name (without the family's prefix, legacy names renewed), read when asked for."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._names: dict[str, tuple[Path, str]] = {}
        for path, name in _tensor_names(directory):
            bare = name.removeprefix(prefix)
            # The names of the first PyTorch conversions, which published files still have.
            bare = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", bare)
            bare = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", bare)
            if bare in self._names:
                raise UserError(f"{path} holds tensor {name} and {self._names[bare][1]}, which mean the same. Drop one")
            self._names[bare] = path, name

    def __getitem__(self, bare: str) -> np.ndarray:
        path, name = self._names[bare]
        with _open(path) as file:
            tensor = file.get_tensor(name)
        if str(tensor.dtype) not in _WIDENED:
            raise UserError(f"{path}: tensor {name} is of dtype {tensor.dtype}; wanted one of {', '.join(_WIDENED)}")
        return tensor.astype(np.float32)

    def __contains__(self, bare: object) -> bool:
        return bare in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dtype(self) -> str:
        """The one dtype of all tensors, float32 where they differ."""
        found = set()
        for path, name in self._names.values():
            with _open(path) as file:
                found.add(_DTYPES.get(file.get_slice(name).get_dtype(), "float32"))
        return found.pop() if len(found) == 1 else "float32"

    def shape(self, bare: str) -> tuple[int, ...]:
        path, name = self._names[bare]
        with _open(path) as file:
            return tuple(file.get_slice(name).get_shape())

    def said(self, bare: str) -> str:
        """The tensor as its file calls it, for a message."""
        path, name = self._names[bare]
        return f"{path}: tensor {name}"


def refuse_pickle(path: Path) -> None:
    """Raises UserError, with the reason and the way to convert it, for a file of pickled weights."""
    if path.is_file() and any(path.match(pattern) for pattern in PICKLES):
        raise UserError(
            f"{path.parent} holds {path.name}, a pickle: reading one can run any code that it contains. Where you "
            "trust it, convert it once with transformers: AutoModelForPreTraining.from_pretrained(FOLDER)."
            "save_pretrained(NEW_FOLDER), and the tokenizer likewise"
        )


def _tensor_names(directory: Path) -> Iterator[tuple[Path, str]]:
    """Each tensor's file and name."""
    if (directory / WEIGHTS_FILE).exists():
        yield from ((directory / WEIGHTS_FILE, name) for name in _names(directory / WEIGHTS_FILE))
        return
    if (directory / INDEX_FILE).exists():
        yield from _indexed(directory)
        return
    for path in sorted(directory.glob("*")):
        refuse_pickle(path)
    raise UserError(f"{directory} holds no {WEIGHTS_FILE}. Is it a Hugging Face model folder?")


def _indexed(directory: Path) -> Iterator[tuple[Path, str]]:
    """The tensors of an index, each known to be in the part that the index names."""
    index = directory / INDEX_FILE
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UserError(f"{index}: weight_map gives no file for each tensor. Fetch it again")
    held: dict[str, set[str]] = {}
    for name, part in parts.items():
        if not (directory / part).is_file():
            raise UserError(f"{index} names {part} (for {name}), which is missing. Fetch it too")
        if part not in held:
            held[part] = set(_names(directory / part))
        if name not in held[part]:
            raise UserError(f"{index} has tensor {name} in {part}, which does not hold it. Fetch both again")
        yield directory / part, name


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file ({error}). Fetch it again") from error


def narrowed(tensors: Mapping[str, np.ndarray], dtype: str) -> tuple[dict[str, np.ndarray], str]:
    """The tensors in the dtype they came from, if that loses nothing, and as float32 otherwise; and the dtype.

    So a half-precision file that was imported is exported as it was, and one that was trained on is not rounded.
    """
    narrow = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    if all(np.array_equal(narrow[name].astype(np.float32), tensor) for name, tensor in tensors.items()):
        return narrow, dtype
    return dict(tensors), "float32"


def save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes tensors as transformers does. Raises OSError for a full disk."""
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # the library writes a file that only its owner can read
    try:
        safetensors.numpy.save_file(whole, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            code = int(found.group(1))
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    path.chmod(mode)
