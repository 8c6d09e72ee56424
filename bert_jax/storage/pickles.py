"""Files of pickled weights, which are never read."""

from pathlib import Path, PurePath

from bert_jax.command import UserError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def is_pickle(name: str | PurePath) -> bool:
    """Whether a file has pickled weights, by its name."""
    return any(PurePath(name).match(pattern) for pattern in PICKLES)


def refuse_pickle(path: Path) -> None:
    """Raises UserError, with the reason and a way to convert it, if a path is a file of pickled weights."""
    if path.is_file() and is_pickle(path):
        raise pickle_error(path.parent, path.name)


def pickle_error(where: str | PurePath, name: str) -> UserError:
    """The error for a pickle in a folder, or in a model of the Hub."""
    return UserError(
        f"{where} holds {name}, a pickle: reading one can run any code that it contains. If you "
        "trust it, convert it once with transformers: AutoModelForPreTraining.from_pretrained(FOLDER)."
        "save_pretrained(NEW_FOLDER), and the tokenizer likewise"
    )
