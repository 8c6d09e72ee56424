"""Reads and writes the tensors of a Hugging Face folder: safetensors in one file or several, never a pickle."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bert_jax.command import UserError
from bert_jax.storage.local import read_json
from bert_jax.storage.pickles import refuse_pickle

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by their names in safetensors
_INTEGERS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
_READABLE = tuple(_DTYPES.values())  # float32 represents every value of the narrower ones


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """The tensors of a folder by bare name, read on access and widened to float32.

    A bare name has no family prefix, and legacy names are replaced by current ones.
    """

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
        with _open(path) as file:
            tensor = file.get_tensor(name)
        if str(tensor.dtype) not in _READABLE:
            raise UserError(f"{path}: tensor {name} has dtype {tensor.dtype}; expected one of {', '.join(_READABLE)}")
        return tensor.astype(np.float32)

    def __contains__(self, bare: object) -> bool:
        return bare in self._names  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dtype(self) -> str:
        """The dtype of all tensors but those of integers, which are no parameters; float32 if they differ."""
        found = set()
        for path, name in self._names.values():
            with _open(path) as file:
                found.add(file.get_slice(name).get_dtype())
        found = {_DTYPES.get(dtype, "float32") for dtype in found if dtype not in _INTEGERS}
        return found.pop() if len(found) == 1 else "float32"

    def shape(self, bare: str) -> tuple[int, ...]:
        path, name = self._names[bare]
        with _open(path) as file:
            return tuple(file.get_slice(name).get_shape())

    def describe(self, bare: str) -> str:
        """Returns the tensor's file and its name there, for messages."""
        path, name = self._names[bare]
        return f"{path}: tensor {name}"


def _tensor_names(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields the file and the name of each tensor."""
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
    """Yields the tensors of an index, after checking that each is in the file that the index names."""
    index = directory / INDEX_FILE
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UserError(f"{index}: weight_map does not map each tensor to a file. Download it again")
    held: dict[str, set[str]] = {}
    for name, part in parts.items():
        if not (directory / part).is_file():
            raise UserError(f"{index} names {part} (for {name}), which is missing. Download it too")
        if part not in held:
            held[part] = set(_names(directory / part))
        if name not in held[part]:
            raise UserError(f"{index} has tensor {name} in {part}, which does not hold it. Download both again")
        yield directory / part, name


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}). Download it again") from error


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file by name, widened to float32. Raises UserError for a missing or damaged file."""
    if not path.is_file():
        raise UserError(f"{path} is missing. Download it next to {path.parent / 'adapter_config.json'}")
    with _open(path) as file:
        return {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118, not a dict


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file as transformers does. Raises OSError for a full disk."""
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # the library makes files that only their owner can read
    try:
        safetensors.numpy.save_file(whole, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            code = int(found.group(1))
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    path.chmod(mode)
