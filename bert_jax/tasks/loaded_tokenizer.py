"""The tokenizers of opened checkpoints, which are built once and kept as long as the checkpoint is in use."""

import threading
import weakref

from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.tokenizer import Tokenizer


class _Kept(threading.local):
    """Each thread has its own, because several threads cannot use a Tokenizer at once."""

    def __init__(self) -> None:
        self.by_model: weakref.WeakKeyDictionary[LoadedModel, Tokenizer] = weakref.WeakKeyDictionary()


_KEPT = _Kept()


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The tokenizer of a checkpoint, the same object in each call of a thread."""
    found = _KEPT.by_model.get(loaded)
    if found is None:
        found = _KEPT.by_model[loaded] = Tokenizer(loaded.vocabulary.spec)
    return found
