"""Says what a recipe's training step would want of TPUs, memory and time, on a machine that has none."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import PretrainConfig

DESCRIPTION = """Compiles a recipe's training step for a TPU slice by libtpu (pip install 'bert_jax[tpu]'; no TPU is
needed) and says whether it fits, how long it takes, and what to change.

  python -m bert_jax.plan --config configs/bert_base.py --topology v5e:4x4 --seq_len 128 --config.batch_size=4096

Topologies are KIND:AxB or KIND:AxBxC, in chips: v4:2x2x4, v5e:16x16, v5p:4x4x4, v6e:8x8, tpu7x:2x2x2. Memory is the
compiler's own count. Time is its cycles for every instruction, loop bodies as often as they run, over the clock; it has
none for Pallas kernels, which are counted at a stated share of the peak, and the total is also given without them.
Rows are those of --config.data.train, or of --seq_len. Compiling takes a minute or several;
--config.model.layer_loop=scan compiles fastest.
"""


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.plan", DESCRIPTION)
    add = parser.add_argument
    add("--config", required=True, help="a recipe of pretraining; --config.KEY=VALUE sets a key")
    add("--topology", required=True, help="a TPU slice, as v5e:16x16")
    add("--slices", type=_positive, default=1, help="so many of them (default: 1)")
    add(
        "--seq_len",
        type=_positive,
        help="slots a row (default: those of --config.data.train, else the model's, to 512)",
    )
    add("--vocab_size", type=_positive, help="ids of the tokenizer (default: that of --config.data.train, else 30522)")
    add("--json", type=Path, help="write the plan here, too")
    add("--html", type=Path, help="write a page with the plan here, too")
    known, overrides = parser.parse_known_args(list(arguments))
    for path in (known.json, known.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"no such folder: {path.absolute().parent}, for {path.name}; make it, or name another file")
    config = _recipe(known.config, overrides)
    # What describes the slice must not look for a TPU of this machine, nor training's programs run on one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from bert_jax.files import write_json
    from bert_jax.planning import page, text
    from bert_jax.planning.estimate import estimate
    from bert_jax.planning.step import Rows
    from bert_jax.planning.topology import open_topology

    rows = Rows.of(config, known.seq_len, known.vocab_size)
    found = estimate(config, open_topology(known.topology, known.slices), rows)
    print("\n".join(text.lines_of(found)))
    if known.json:
        write_json(known.json, found.as_json())
    if known.html:
        known.html.write_text(page.page_of(found), encoding="utf-8")


def _recipe(name: str, overrides: Sequence[str]) -> PretrainConfig:
    """Raises UserError for a recipe of something else than pretraining."""
    values = config_lib.read_flags(name, overrides)
    if "task" in values:
        raise UserError(f"{name} is a recipe of fine-tuning; plan takes those of pretraining, as configs/bert_base.py")
    return config_lib.load(PretrainConfig, values)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    command.run(main)
