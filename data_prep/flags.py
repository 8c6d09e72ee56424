"""The options that every command with --input shares: how the text is read."""

from dataclasses import dataclass

from bert_jax.config.options import Valid, option
from data_prep.readers.corpus import Reading
from data_prep.readers.text import FORMATS


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How the files of --input become documents."""

    input_format: str = option(
        "auto",
        f"format of every input file: {', '.join(FORMATS)}; or auto: by its name, and text by its content, too",
        metavar="NAME",
    )
    text_field: str = option(
        "text",
        "field or column that holds the text, in JSONL, CSV, TSV, Parquet, Arrow and TFDS",
        metavar="NAME",
        aliases=["text"],
    )
    document: str = option(
        "blank_line", "what separates the documents of text: blank_line, or file (each file is one document)"
    )
    document_separator: str = option(
        "",
        "the line that separates the documents of text, in place of blank lines, for example '<|endoftext|>' or ---; "
        "default: a blank line",
        metavar="LINE",
        dashes=True,
    )
    on_error: str = option("fail", "for input that cannot be used: fail, or skip and count it")
    workers: int = option(
        0,
        "number of processes; 0: one for each core (ray: of the cluster)",
        metavar="N",
        valid=Valid(lambda count: count >= 0, "0 or more (0: one for each core)"),
    )

    def reading(self, workers: int) -> Reading:
        """Returns how so many processes read. Raises UserError for an unknown choice."""
        return Reading(
            self.text_field, self.document, self.on_error, self.input_format, self.document_separator, workers
        )
