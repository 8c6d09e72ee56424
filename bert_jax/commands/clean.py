"""Cleans text: keeps the documents of good quality, once each.

`clean` is the job; the rules are in data_prep/cleaning/.
"""

import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bert_jax.config import options as option_lib
from bert_jax.config.options import between, option
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import read_json, refuse_existing
from bert_jax.storage.remote import as_address
from data_prep import processes
from data_prep.cleaning import job, rules
from data_prep.cleaning.job import SIGNATURES, Merging, read_signatures
from data_prep.cleaning.rules import RULES
from data_prep.cleaning.unit import VERSION, CleanedUnit, Steps, clean_unit, read_record
from data_prep.job import complete, finished_units, keeping_units, own_folders, resumable_folder, unit_folder
from data_prep.output_files import make_in_store
from data_prep.processes import keep_freed
from data_prep.readers.corpus import Corpus, Reading, find_sources
from data_prep.summary import PART, REPORT
from data_prep.units import Unit

DESCRIPTION = """\
Keeps documents of good quality, once each, and writes them as JSON lines for the other commands.

  bert-jax clean --input 'crawl/*.txt.xz' --output clean/crawl --rules gopher_repetition,gopher,c4,fineweb \\
      --languages en --near_duplicates
  bert-jax build-examples --input 'clean/crawl/*.jsonl.zst' ...

--rules apply in the given order. They drop whole documents; c4 also drops lines:
  gopher_repetition  repeated lines, paragraphs and n-grams (Rae et al. 2021, table A1)
  gopher             length, symbols, bullets, common English words (the same, appendix A.1.1)
  c4                 lines that are no sentences, notices, code; few sentences (Raffel et al. 2020, section 2.2)
  fineweb            lines without punctuation, short lines, repeated lines (Penedo et al. 2024, section 3.6)
They are for languages that write spaces between words; c4 and gopher are for English.

Then documents equal to an earlier one are dropped, and with --near_duplicates also documents that share most runs of
five words with one (MinHash: 92% of pairs with a Jaccard similarity of 0.8). --against compares with earlier outputs,
too. OUTPUT gets part-*.jsonl.zst, report.json with the number of documents dropped by reason, index.html with samples
of them, and signatures.npy for --against. The same command resumes a job that was stopped or killed. The same text and
options give the same documents, with any number of workers.
"""
UNIT_MB = 8


@dataclass(frozen=True)
class CleanOptions(Reading):
    """What to clean, and how."""

    input: str | Path = option(help="text, as build_examples reads it: globs, separated by commas", metavar="GLOB")
    output: str | Path = option(help="the folder to create", metavar="DIR")
    rules: str = option("", "sets of rules, separated by commas; default none", metavar="NAMES")
    languages: str = option("", "languages to keep, such as en,de; default all", metavar="CODES")
    language_score: float = option(0.0, "least probability of the language", metavar="P", valid=between(0, 1))
    near_duplicates: bool = option(False, "drop documents that nearly repeat an earlier one")
    against: str = option("", "outputs whose near-duplicates are dropped, too, by commas; default none", metavar="DIRS")
    duplicate_lines: bool = option(False, "remove lines that occurred before, in any document (Wenzek et al. 2020)")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _names(self.rules):
            if name not in RULES:
                raise UserError(f"--rules: unknown name {name!r}; choose from {', '.join(RULES)}")
        if self.language_score and not self.languages:
            raise UserError("--language_score is for --languages; add --languages, or leave it out")
        if self.against and not self.near_duplicates:
            raise UserError("--against compares near-duplicates; add --near_duplicates, or leave it out")

    @property
    def steps(self) -> Steps:
        return Steps(
            rules=_names(self.rules),
            languages=_names(self.languages),
            language_score=self.language_score,
            near_duplicates=self.near_duplicates,
            duplicate_lines=self.duplicate_lines,
        )


def clean(options: CleanOptions, *, quiet: bool = True) -> dict[str, Any]:
    """Cleans text as the command does, and returns the content of report.json.

    With several workers, call it under `if __name__ == "__main__"` in a script, as multiprocessing requires.

    Raises:
        UserError: The options or the input have a mistake. Finished units are kept for the next call.
    """
    output = Path(os.path.abspath(options.output))
    report = make_in_store(output, REPORT, lambda folder: _clean(options, folder, quiet))
    if not quiet:
        documents, dropped = report["documents"], [f"{count} {name}" for name, count in report["dropped"].items()]
        listed = ", ".join(dropped) or "none"
        name = as_address(output)
        print_note(f"{name}: {documents['kept']} of {documents['read']} documents; dropped: {listed}")
    return report


def _clean(options: CleanOptions, output: Path, quiet: bool) -> dict[str, Any]:
    refuse_existing(output)
    steps, others = options.steps, _others(options.against)
    rules.check(steps.languages)
    processes.begin(options.workers)
    sources = find_sources(str(options.input), own=own_folders(output))
    corpus = Corpus(sources, replace(options, workers=options.workers or processes.cores()))
    settings: dict[str, Any] = {"input": str(options.input), "against": list(map(str, others))}
    settings |= {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(steps).items()}
    # Everything that decides the content of a unit: a job resumes only if all of it is the same.
    arguments = settings | {"sources": [list(source) for source in sources], "document": options.document}
    arguments |= {"document_separator": options.document_separator}
    arguments |= {"text_field": options.text_field, "input_format": options.input_format}
    arguments |= {"version": VERSION, "signatures": list(others.values())}
    with resumable_folder(output, arguments) as directory:
        # Workers clean units in any order. One process then removes duplicates in the order of the text, so that the
        # same text gives the same documents with any number of workers.
        records = _run(steps, corpus, directory, options.workers, quiet)
        merging = Merging(steps)
        for folder in others:
            merging.add_others(folder)
        with Reporter("removing duplicates", len(records), ("documents",), quiet) as reporter:
            for record in records:
                merging.merge(directory, record, directory / PART.format(record.number))
                reporter.advance(1, record.kept)
        if not merging.documents:
            shutil.rmtree(unit_folder(directory))  # a later run with these options would end here, too
            read = sum(record.documents for record in records)
            raise UserError(f"none of the {read} documents of --input is left. Use fewer --rules, or other text")
        if steps.near_duplicates:
            merging.write_signatures(directory)
        report = job.report(records, merging, corpus.refused, settings)
        job.write(report, directory, output.name)
        complete(directory, output)
    return report


def _run(steps: Steps, corpus: Corpus, directory: Path, workers: int, quiet: bool) -> list[CleanedUnit]:
    """Applies the rules to all units not finished by an earlier run. Returns every unit's record, in order."""
    records: list[CleanedUnit] = []
    cleaned = 0  # bytes of text

    def unfinished() -> Iterator[Unit]:
        # While workers take the others from this generator, finished units are added here, in no order; they are sorted
        # in the end.
        for unit in units(corpus):
            record = read_record(directory, unit)
            if record is None:
                yield unit
            else:
                records.append(record)

    if (resumed := finished_units(directory)) and not quiet:
        print(f"resuming {directory}: {resumed} units are finished", file=sys.stderr)
    with Reporter("cleaning", corpus.total_bytes, ("MB",), quiet) as reporter:
        for record in processes.run_units(functools.partial(clean_unit, steps), unfinished(), workers, directory):
            records.append(record)
            cleaned += record.bytes
            reporter.update(corpus.bytes_read, cleaned / 1e6)
    return sorted(records, key=lambda record: record.number)


def units(corpus: Corpus) -> Iterator[Unit]:
    """Yields a corpus's documents, in order, in units of 8 MB or one larger document."""
    number = size = 0
    documents: list[bytes] = []
    for text in corpus.texts():
        assert text is not None  # it stands between passes, and there is one
        documents.append(text)
        size += len(text)
        if size >= UNIT_MB * 1_000_000:
            yield _unit(number, documents)
            number, size, documents = number + 1, 0, []
    if documents:
        yield _unit(number, documents)


def _unit(number: int, documents: list[bytes]) -> Unit:
    digest = hashlib.blake2b(digest_size=16)
    for text in documents:
        # With the length, so that no other division of the same bytes has this digest.
        digest.update(len(text).to_bytes(8, "little") + text)
    return Unit("train", number, tuple(documents), digest.hexdigest())


def _names(commas: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in commas.split(",") if name.strip())


def _others(against: str) -> dict[Path, str]:
    """Hashes the signatures in each folder of --against. Raises UserError for an unusable folder."""
    hashes = {}
    for folder in (Path(os.path.abspath(name)) for name in _names(against)):
        if not (folder / SIGNATURES).exists():
            raise UserError(f"--against {folder}: it has no {SIGNATURES}. Name an output made with --near_duplicates")
        if read_json(folder / REPORT).get("version") != VERSION:
            raise UserError(
                f"--against {folder}: another version of bert-jax clean made it, whose signatures differ. Clean its "
                "text again"
            )
        # Checks the file now, before hours of cleaning.
        read_signatures(folder)
        with (folder / SIGNATURES).open("rb") as file:
            hashes[folder] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def main(arguments: Sequence[str]) -> None:
    options = option_lib.parse("bert-jax clean", DESCRIPTION, CleanOptions, arguments)
    keep_freed()
    with keeping_units(Path(options.output)):
        clean(options, quiet=False)
