"""Models of the Hugging Face Hub by their names, such as bert-base-uncased or BAAI/bge-small-en-v1.5."""

import re
from pathlib import Path

from bert_jax.command import UserError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What a model is opened from; a repository may also hold it in other formats, which are large.
_FILES = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json", "adapter_*", "tokenizer*", "vocab*"),
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "modules.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/*", "2_Normalize/*"),
)


def model_folder(source: str | Path) -> str | Path:
    """Returns a path that exists, or an address in a store, as it is; for the name of a model on the Hub, its files.

    They are downloaded to the Hub's cache, unless they are there. Raises UserError where the name is that of no model,
    and where it cannot be downloaded.
    """
    name = str(source)
    if isinstance(source, Path) or Path(name).exists() or not _NAME.fullmatch(name):
        return source
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(
            f"no checkpoint at {name}, and no model of that name on the Hugging Face Hub. Check the name; a private "
            "model needs HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"no checkpoint at {name}, and the Hugging Face Hub cannot be reached ({reason}). Download the model where "
            f"there is a network (hf download {name} --local-dir DIR) and give DIR"
        ) from None
