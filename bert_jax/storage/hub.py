"""Models of the Hugging Face Hub by their names, such as bert-base-uncased or BAAI/bge-small-en-v1.5."""

import errno
import re
from pathlib import Path, PurePath
from typing import Literal

from bert_jax.errors import UserError
from bert_jax.storage.files import is_pickle, pickle_error
from bert_jax.storage.remote import first_line

PREFIX = "hf:"  # before the name of a model, where commands take a checkpoint or a tokenizer
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER = (
    "config.json",  # which may name the tokenizer's class
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model"),
)
# What each is opened from; a repository may also hold a model in other formats, which are large.
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
    """Returns a path that exists, or an address in a store, as it is; for the name of a model on the Hub, hf:NAME.

    The name may have the prefix hf: already, and then no path is meant.
    """
    name = str(source)
    if name.startswith(PREFIX) or isinstance(source, Path) or Path(name).exists() or not _NAME.fullmatch(name):
        return source
    return PREFIX + name


def named_folder(address: str | PurePath, what: Literal["checkpoint", "tokenizer"] = "checkpoint") -> str | PurePath:
    """Returns the folder of hf:NAME, a model on the Hub, and everything else as it is.

    what    checkpoint: the whole model; tokenizer: no weights

    The files are downloaded to the Hub's cache, unless they are there. Raises UserError where the name is that of no
    model, where it cannot be downloaded, and for a model whose weights are pickles alone.
    """
    name = str(address)
    if not name.startswith(PREFIX) or "://" in name:
        return address
    name = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise UserError(f"{address} is not the name of a model on the Hugging Face Hub. Use hf:NAME or hf:ORG/NAME")
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES[what])))
        if what == "checkpoint" and not any(folder.glob("*.safetensors")):
            pickles = filter(is_pickle, _listed(name))
            if found := min(pickles, key=lambda file: ("model" not in file, file), default=""):
                raise pickle_error(address, found)
        return folder
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(
            f"no {what} at {name}, and no model of that name on the Hugging Face Hub. Check the name; a private "
            "model needs HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise UserError(
                f"cannot download {name} to the cache of the Hugging Face Hub: {error.strerror or error}. Free some "
                "space, correct its mode, or set HF_HOME to another folder"
            ) from None
        raise _unreachable(f"no {what} at {name}", name, error) from None


def _listed(name: str) -> list[str]:
    """The files of a model on the Hub whose weights are not in the cache.

    Raises the Hub's own errors, and UserError for those of the library that connects to it.
    """
    from huggingface_hub import HfApi, errors

    try:
        return HfApi().list_repo_files(name)
    except errors.HfHubHTTPError:
        raise
    except Exception as error:
        raise _unreachable(f"the cache has the tokenizer of {name} but no weights", name, error) from None


def _unreachable(found: str, name: str, error: Exception) -> UserError:
    return UserError(
        f"{found}, and the Hugging Face Hub cannot be reached ({first_line(error)}). Download the model where there is "
        f"a network (hf download {name} --local-dir DIR) and give DIR"
    )
