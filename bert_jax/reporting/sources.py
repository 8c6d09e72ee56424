"""The sources of a mixture in the report of a run: the epochs that it read, and the held-out metrics of each."""

from bert_jax.reporting.chart import number
from bert_jax.reporting.curves import Lines, show_of, title_of
from bert_jax.reporting.document import Section, Table
from bert_jax.train.held_out import PREFIX

EPOCHS = "epochs/"


def source_section(lines: Lines) -> Section:
    """A row for each source, with the epochs and metrics that were logged last; empty for a run without a mixture."""
    logged: dict[str, float] = {}
    for line in lines:
        logged |= {name: value for name, value in line.items() if "/" in name and value is not None}
    sources = [name.removeprefix(EPOCHS) for name in logged if name.startswith(EPOCHS)]
    found = {name.removeprefix(PREFIX): value for name, value in logged.items() if name.startswith(PREFIX)}
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in found))
    if not sources:
        return Section("Sources of the mixture")
    rows = [
        [
            source,
            number(logged[EPOCHS + source]),
            *(show_of(each)(found[f"{source}/{each}"]) if f"{source}/{each}" in found else "-" for each in metrics),
        ]
        for source in sources
    ]
    note = "Epochs that were read of the training rows, and metrics of the held-out rows, as they were last logged."
    return Section("Sources of the mixture", [Table(["source", "epochs", *map(title_of, metrics)], [rows])], note)
