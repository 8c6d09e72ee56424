"""Writes an HTML report of a run, or of several runs side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.config.options import at_least, check, option, parse
from bert_jax.errors import UserError
from bert_jax.reporting.report import EXAMPLES, compare, report
from bert_jax.train.compilation import enable_compilation_cache

DESCRIPTION = """Writes a report of a run as one HTML file, WORKDIR/report.html, which needs no network.

  bert-jax report runs/tiny

It shows the results, curves (losses, accuracies, learning rate, throughput, waiting and padding) and the whole
configuration. For pretraining, it has a table of masked held-out sentences with the labels and the five most likely
tokens. For fine-tuning, it has metrics and curves by seed, and evaluates the model on its dev file again: confusion of
classes or tags, calibration, entities found and missed, and the examples with the highest loss. An unfinished run has a
report of its steps so far.

  bert-jax report runs/a runs/b --output compared.html

Several runs of one kind are compared on one page: results side by side, curves in the same charts, and the
configuration keys that differ.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    workdir: tuple[str, ...] = option(help="folders of runs", metavar="WORKDIR", positional="+")
    examples: int | None = option(
        None,
        f"evaluate at most N examples of a fine-tuned run's dev file; default {EXAMPLES:,}",
        metavar="N",
        valid=at_least(1),
    )
    output: str = option("", "the page that compares several runs, e.g. compared.html", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        several = len(self.workdir) > 1
        if several and self.examples is not None:
            raise UserError("--examples is for the report of one run; a comparison evaluates none. Leave it out")
        if several and not self.output:
            raise UserError("several runs are compared on a page of their own; name it: --output compared.html")
        if self.output and not several:
            raise UserError("--output is for a comparison of several runs; a single report is WORKDIR/report.html")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax report", DESCRIPTION, Options, arguments)
    enable_compilation_cache()  # the report of a fine-tuned run runs the model again
    if options.output:
        print(compare(options.workdir, options.output))
    else:
        print(report(options.workdir[0], options.examples))
