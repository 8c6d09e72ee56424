"""Estimates the memory and time of a recipe's training step on TPUs or GPUs, on a machine that has none."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax import config as config_lib
from bert_jax.config import PretrainConfig
from bert_jax.config.options import at_least, check, option, parse_known
from bert_jax.errors import UserError
from bert_jax.progress import print_note

DESCRIPTION = """Compiles a recipe's training step for TPUs or GPUs, and needs none. It reports whether the step fits
the memory, how long a step and the whole run take, and how fast the input must be (docs/plan.md).

  bert-jax plan --config bert_base --topology v5litepod-16 --seq_len 128 --config.batch_size=4096
  bert-jax plan --config bert_base --topology h100:8 --seq_len 128 --config.batch_size=2048

TPUs have the names of clouds (v5litepod-16, v6e-256; v4-64 and v5p-64 count two TensorCores per chip), or their shape
in chips: v5e:4x4, v4:2x2x4, tpu7x:2x2x2. They need libtpu, from the extra tpu (docs/install.md). GPUs are KIND, KIND:N,
or KIND:NxHOSTS for N in each of several hosts: a100:8, h100, h100:8x4, h200:8, b200:8. They need jax's CUDA plugin,
from the extras gpu12 or, for CUDA 13, gpu.

Memory is the compiler's own count. Time on TPUs is the sum of the compiler's cycle estimates for all instructions; on
GPUs it is a roofline of total FLOPs and memory traffic. Rows are as in --config.data.train or data.mixture, or as
--seq_len says. Compiling takes one to several minutes; --config.model.layer_loop=scan compiles fastest.
"""


@dataclass(frozen=True)
class Options:
    config: str = option(help="a pretraining recipe; --config.KEY=VALUE sets a key", metavar="RECIPE")
    topology: str = option(help="TPUs, such as v5litepod-16 or v5e:4x4, or GPUs, such as h100:8", metavar="NAME")
    slices: int = option(1, "number of TPU slices", metavar="N", valid=at_least(1))
    seq_len: int | None = option(
        None,
        "positions per row; default: those of --config.data.train, else the model's, at most 512",
        metavar="T",
        aliases=["max_length"],
        valid=at_least(1),
    )
    vocab_size: int | None = option(
        None,
        "vocabulary size; default: that of --config.data.train, or of the checkpoint of "
        "--config.model.preset=checkpoint, else 30522",
        metavar="V",
        valid=at_least(1),
    )
    json: Path | None = option(None, "also write the plan to this JSON file", metavar="FILE")
    html: Path | None = option(None, "also write the plan to this HTML page", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        for path in (self.json, self.html):
            if path is not None and not path.absolute().parent.is_dir():
                folder = path.absolute().parent
                raise UserError(
                    f"cannot write {path.name}: {folder} does not exist; create the folder or choose another file"
                )


def main(arguments: Sequence[str]) -> None:
    options, overrides = parse_known("bert-jax plan", DESCRIPTION, Options, arguments)
    config = config_lib.from_flags(PretrainConfig, options.config, overrides)
    # Neither the description of devices nor traced functions may use this machine's devices. The imports below load
    # jax, so they follow the setting.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from bert_jax.planning.compile import RowSpec, with_architecture
    from bert_jax.planning.estimate import document, estimate
    from bert_jax.planning.topology import open_topology
    from bert_jax.reporting import document as reporting_document
    from bert_jax.reporting import page
    from bert_jax.storage.files import write_json
    from bert_jax.train.run_size import many_rows

    # Compared with the recipe as shipped, whose number of steps reads many more rows in larger batches.
    recipe = config_lib.from_flags(PretrainConfig, options.config)
    if longer := many_rows(config, recipe, options.config):
        print_note(longer)
    config, vocab_size = with_architecture(config, options.vocab_size)
    rows = RowSpec.of(config, options.seq_len, vocab_size)
    estimated = estimate(config, open_topology(options.topology, options.slices), rows)
    reporting_document.print_document(document(estimated))
    if options.json:
        write_json(options.json, estimated.as_json())
    if options.html:
        options.html.write_text(page.render(document(estimated)), encoding="utf-8")
