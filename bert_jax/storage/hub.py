"""Models on the Hugging Face Hub by their names, such as bert-base-uncased or BAAI/bge-small-en-v1.5."""

import errno
import re
from pathlib import Path, PurePath
from typing import Literal

from bert_jax.errors import UserError
from bert_jax.storage.files import is_pickle, pickle_error
from bert_jax.storage.remote import first_line

PREFIX = "hf:"  # before a model's name, if a command takes a checkpoint or a tokenizer
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER = (
    "config.json",  # which may name the tokenizer's class
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model"),
)
# The files to download; a repository may also hold a model in other formats, which are large.
_FILES = {
    "tokenizer": _TOKENIZER,
    "checkpoint": (
        *("model*.safetensors", "model.safetensors.index.json", "adapter_*", "task.json"),
        *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
        *("*_Pooling/*", "*_Normalize/*"),
        *_TOKENIZER,
    ),
}


def model_address(source: str | Path) -> str | Path:
    """Returns hf:NAME for the name of a model on the Hub, and anything else as it is.

    A path that exists is no such name, unless it has the prefix hf: already.
    """
    name = str(source)
    if name.startswith(PREFIX) or isinstance(source, Path) or Path(name).exists() or not _NAME.fullmatch(name):
        return source
    return PREFIX + name


def named_folder(address: str | PurePath, kind: Literal["checkpoint", "tokenizer"] = "checkpoint") -> str | PurePath:
    """Downloads hf:NAME, a model on the Hub, to the Hub's cache and returns its folder; anything else as it is.

    Args:
        kind: checkpoint: the whole model; tokenizer: no weights.

    Raises:
        UserError: no model has this name, the download fails, or the model has pickled weights only.
    """
    name = str(address)
    if not name.startswith(PREFIX) or "://" in name:
        return address
    name = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise UserError(f"{address} is not the name of a model on the Hugging Face Hub. Use hf:NAME or hf:ORG/NAME")
    from huggingface_hub import HfApi, errors, snapshot_download

    local = f"no {kind} at {name}"
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES[kind])))
        if kind == "checkpoint" and not any(folder.glob("*.safetensors")):
            local = f"the cache has the tokenizer of {name} but no weights"
            pickles = filter(is_pickle, HfApi().list_repo_files(name))
            if pickle := min(pickles, key=lambda file: ("model" not in file, file), default=""):
                raise pickle_error(address, pickle)
        return folder
    except UserError:
        raise
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(
            f"no {kind} at {name}, and no model of that name on the Hugging Face Hub. Check the name; a private "
            "model needs HF_TOKEN"
        ) from None
    except Exception as error:  # the connection's package has errors of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise UserError(
                f"cannot download {name} to the cache of the Hugging Face Hub: {error.strerror or error}. Free some "
                "space, correct its mode, or set HF_HOME to another folder"
            ) from None
        raise UserError(
            f"{local}, and the Hugging Face Hub cannot be reached ({first_line(error)}). Download the model where "
            f"there is a network (hf download {name} --local-dir DIR) and give DIR"
        ) from None
