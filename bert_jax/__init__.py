"""bert_jax: pretrain, fine-tune and export bidirectional encoders in JAX.

    import bert_jax

    model = bert_jax.load("runs/stars")              a workdir, an export, a Hugging Face folder or model name
    model.encode(texts)                              vectors
    model.fill_mask("Paris is the [MASK] of France.")
    model.predict(texts)                             labels, of a fine-tuned model
    model.evaluate(rows)                             its metrics on labelled data
    bert_jax.finetune(model, train=rows, dev=rows, text="review", label="stars")
    bert_jax.pretrain("bert_tiny", "runs/tiny", data="shards")

`__all__` lists what is public and stable here (docs/python.md). These names are imported when they are used, so that
`import bert_jax` is fast and does not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.api import Model, build_examples, finetune, load, pretrain, train_tokenizer
    from bert_jax.errors import UserError

# setup.cfg reads the version from here, so that a checkout that is not installed knows it too.
__version__ = "0.1.0"

__all__ = ["Model", "UserError", "build_examples", "finetune", "load", "pretrain", "train_tokenizer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"bert_jax.{'errors' if name == 'UserError' else 'api'}"), name)
    raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
