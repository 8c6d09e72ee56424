"""The flags by which every command that takes --input reads it, as fields of a dataclass of options (flags.py)."""

from typing import Any

from data_prep.flags import option
from data_prep.readers.input_format import FORMATS
from data_prep.readers.reading import Reading


def input_format() -> Any:
    return option(
        "auto",
        f"format of every input file: {', '.join(FORMATS)}; or auto: by its name, and text by its content, too",
        metavar="NAME",
    )


def text_field() -> Any:
    return option(
        "text",
        "field or column that holds the text, in JSONL, CSV, TSV, Parquet, Arrow and TFDS",
        metavar="NAME",
        aliases=["text"],
    )


def document() -> Any:
    return option("blank_line", "what separates the documents of text: blank_line, or file (each file is one document)")


def document_separator() -> Any:
    return option(
        "",
        "the line that separates the documents of text, in place of blank lines, for example '<|endoftext|>' or ---; "
        "default: a blank line",
        metavar="LINE",
        dashes=True,
    )


def on_error() -> Any:
    return option("fail", "for input that cannot be used: fail, or skip and count it")


def reading(options: Any, workers: int) -> Reading:
    """What options with these fields state, by so many processes. Raises UserError for an unknown choice."""
    given = options.text_field, options.document, options.on_error, options.input_format, options.document_separator
    return Reading(*given, workers)
