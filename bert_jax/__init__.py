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
import importlib.metadata
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.api import Model, build_examples, finetune, load, pretrain, train_tokenizer
    from bert_jax.errors import UserError

# setup.cfg reads the version from here, so that a checkout that is not installed knows it too.
__version__ = "0.1.0"

__all__ = ["Model", "UserError", "build_examples", "finetune", "load", "pretrain", "train_tokenizer"]

# jaxlib versions that hand parts of CPU programs to a faulty YNNPACK: 0.10.2 returns wrong numbers for the sum of a
# vmapped product (jax issue 39103), and sums over arrays of rank 7 crash (39257, 40412). 0.11.2 is right again.
FAULTY_JAXLIB = ("0.10.2", "0.11.0", "0.11.1")
_WITHOUT_YNNPACK = "--xla_cpu_experimental_ynn_fusion_type="


def _avoid_faulty_fusions() -> None:
    """Sets the XLA flag that avoids these faults. It warns if it is too late: XLA reads its flags only once."""
    flags = os.environ.get("XLA_FLAGS", "")
    # Other versions may not know the flag, and XLA ends a process that has an unknown one.
    if importlib.metadata.version("jaxlib") not in FAULTY_JAXLIB or _WITHOUT_YNNPACK in flags:
        return
    os.environ["XLA_FLAGS"] = f"{flags} {_WITHOUT_YNNPACK}".lstrip()
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge and bridge.backends_are_initialized():
        warnings.warn(
            "jax was used before bert_jax was imported, so its programs on CPUs may compute wrong sums (jax issue "
            f"39103). Import bert_jax first, or set XLA_FLAGS={_WITHOUT_YNNPACK}",
            stacklevel=3,
        )


_avoid_faulty_fusions()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"bert_jax.{'errors' if name == 'UserError' else 'api'}"), name)
    raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
