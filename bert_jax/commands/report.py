"""Writes an HTML report of a run, or of several runs side by side."""

from collections.abc import Sequence

from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.reporting.report import EXAMPLES, compare, report
from bert_jax.train.compilation import enable_compilation_cache

DESCRIPTION = """Writes a report of a run as one HTML file, WORKDIR/report.html, which needs no network and no other
file.

  bert-jax report runs/tiny

It shows the results, curves (losses, accuracies, learning rate, throughput, waiting and padding) and the whole
configuration. For pretraining it has a table of masked held-out sentences with the labels and the five most likely
tokens. For fine-tuning it has the metrics and curves by seed, and evaluates the model on its dev file again: confusion
of classes or tags, calibration, entities found and missed, and the examples with the highest loss. For a run that is
not finished, or was killed, it shows what there is so far.

  bert-jax report runs/a runs/b --output compared.html

Several runs of one kind are compared on one page: results side by side, their curves in the same charts, and the keys
of the configuration that differ.
"""


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("bert-jax report", DESCRIPTION)
    parser.add_argument(
        "workdir", metavar="WORKDIR", nargs="+", help="the folder of a pretraining or fine-tuning run, or several"
    )
    what = f"evaluate at most N examples of a fine-tuned run's dev file (default: {EXAMPLES:,})"
    parser.add_argument("--examples", type=int, metavar="N", help=what)
    parser.add_argument("--output", metavar="FILE", help="the page that compares several runs, e.g. compared.html")
    options = parser.parse_args(list(arguments))
    enable_compilation_cache()
    if options.examples is not None and options.examples < 1:
        raise UserError(f"--examples is {options.examples}; it must be at least 1")
    if len(options.workdir) > 1:
        if options.examples is not None:
            raise UserError("--examples is for the report of one run; a comparison evaluates none. Leave it out")
        if not options.output:
            raise UserError("several runs are compared on a page of their own; name it: --output compared.html")
        print(compare(options.workdir, options.output))
    elif options.output:
        raise UserError("--output is for a comparison of several runs; the report of one run is WORKDIR/report.html")
    else:
        print(report(options.workdir[0], options.examples))
