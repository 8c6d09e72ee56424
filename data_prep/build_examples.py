"""Builds pretraining examples from text: `build` for notebooks, `bert-jax build-examples` for a terminal."""

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax import tokenizer as tokenizers
from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, PAIRS, read_manifest
from bert_jax.progress import Reporter
from bert_jax.storage.compression import SUFFIXES as COMPRESSED
from bert_jax.storage.local import refuse_existing
from bert_jax.tokenizer import Tokenizer
from data_prep import build_options, checksums, engines, processes, reading_options, shares, summary, worker
from data_prep.build_options import BuildOptions
from data_prep.build_parts import build_parts
from data_prep.cleaning import lineage
from data_prep.encoding import refuse_newlines
from data_prep.job import Arguments, Job, open_job
from data_prep.memory import keep_freed
from data_prep.objectives import fewest_documents
from data_prep.readers import Corpus, Source, find_sources
from data_prep.resumable import finished_units, keeping_units, own_folders
from data_prep.shares import Share
from data_prep.token_cache import TokenCache
from data_prep.unit_records import UnitRecord, read_record
from data_prep.units import Unit, UnitSplitter, UnusableCorpus

SHORT_SEQ_PROB = 0.1  # google-research/bert, create_pretraining_data.py
MB = 1_000_000
GB = 1_000_000_000


def build(options: BuildOptions, *, quiet: bool = True, own: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Builds the examples as the command does, and returns the manifest.

    own   further folders of this job, which are no text where --input matches them
    With more than one worker, call it under `if __name__ == "__main__"` in a script, as multiprocessing requires.
    Raises UserError for a mistake in the options or the input; finished units are kept for the next call.
    """
    output = Path(os.path.abspath(options.output))
    refuse_existing(output)
    if len(every := shares.parse(options.part)) > 1:
        return build_parts(options, output, every, quiet=quiet)
    _refuse_taken(every[0], options.tokenizer)
    engines.begin(options.engine, options.workers)
    sources = find_sources(str(options.input), options.weights, (*own, *own_folders(output)))
    tokenizer = tokenizers.load(options.tokenizer, options.lowercase)
    if options.newlines == "keep":
        refuse_newlines(tokenizer)
    arguments = _arguments(options, sources, tokenizer)
    # Workers of another engine are elsewhere, and this process reads for all of them.
    readers = (options.workers if options.engine == "local" else 0) or processes.cores()
    corpus = Corpus(arguments.sources, reading_options.reading(options, readers))
    cleaning = lineage.reports_of(arguments.sources)
    cache = None
    if options.token_cache is not None:
        folder = Path(os.path.abspath(options.token_cache))
        cache = TokenCache(folder, round(options.token_cache_gb * GB), options.newlines)
        cache.prepare()
    with open_job(output, arguments, tokenizer) as job:
        return _run(job, corpus, cleaning, cache, quiet)


def _refuse_taken(share: Share, tokenizer: str | Path) -> None:
    """Raises UserError for an added share if the output that has the tokenizer already has one of its number."""
    folder = Path(os.path.abspath(tokenizer)).parent
    if share.of or not all((folder / name).exists() for name in (MANIFEST, checksums.SUMS)):
        return
    taken = {each["number"] for each in shares.of_manifest(read_manifest(folder))}
    if share.number in taken:
        raise UserError(
            f"--part +{share.number}: {folder}, which has the --tokenizer, already has this share. Use --part "
            f"+{max(taken) + 1}, or name the tokenizer of the output that the text is added to"
        )


def _arguments(options: BuildOptions, sources: tuple[Source, ...], tokenizer: Tokenizer) -> Arguments:
    """The options, and defaults that depend on other options or on the text."""
    short_seq_prob = options.short_seq_prob
    if short_seq_prob is None:
        # Packing makes short sequences itself (split_for_packing.py); more of them would not fill rows that hold only
        # a few sequences.
        short_seq_prob = SHORT_SEQ_PROB if options.objective in PAIRS and options.pack == 1 else 0.0
    unit_bytes = round(options.unit_mb * MB) if options.unit_mb else _default_unit_bytes(sources)
    (share,) = shares.parse(options.part)
    chosen, digest = shares.sources_of(share, sources), shares.digest(sources)
    return Arguments(options, short_seq_prob, unit_bytes, share, chosen, digest, tokenizer.content_hash)


def _run(
    job: Job, corpus: Corpus, cleaning: list[dict[str, Any]], cache: TokenCache | None, quiet: bool
) -> dict[str, Any]:
    """Splits the corpus, skips finished units, passes the others to the engine, and finishes the folder."""
    arguments, options = job.arguments, job.arguments.options
    fewest = fewest_documents(options.objective)
    first = arguments.share.first_unit
    divided = arguments.share.is_divided
    splitter = UnitSplitter(arguments.unit_bytes, options.eval_fraction, fewest, options.dedup, first, divided)
    records: list[UnitRecord] = []
    tokens = done = before = 0

    def report() -> None:
        """Shows progress by the documents in finished units, because an engine may read far ahead of them."""
        found = max(splitter.documents, 1)
        reporter.skip(corpus.bytes_read * before / found)
        reporter.update(corpus.bytes_read * done / found, megabytes(), tokens / 1e6)

    def megabytes() -> float:
        """Text of the units that this run has finished."""
        return splitter.bytes / MB * (done - before) / max(splitter.documents, 1)

    # Units are found while engines ask for them, so that neither the text nor the list of units is held in memory.
    def unfinished() -> Iterator[Unit]:
        nonlocal done, before
        try:
            for unit in splitter.split(documents()):
                if options.part and unit.number >= first + shares.UNITS:
                    raise UserError(f"a part has at most {shares.UNITS} units. Use more parts, or a larger --unit_mb")
                record = read_record(job.directory, unit)
                if record is None:
                    yield unit
                else:
                    records.append(record)
                    done += record.counts["documents"]
                    before += record.counts["documents"]
        except UnusableCorpus as error:
            said = str(error)
            if divided:
                said = f"the files of --part {options.part} have too few documents. Use fewer parts"
            skipped = summary.listed(corpus.refused + splitter.skipped)
            raise UnusableCorpus(f"{said}; skipped: {skipped}" if skipped else said) from None

    def documents() -> Iterator[bytes | None]:
        for document in corpus.texts():
            report()
            yield document

    resumed = finished_units(job.directory)
    if resumed and not quiet:
        print(f"resuming {job.directory}: {resumed} units are finished", file=sys.stderr)
    work = functools.partial(worker.build_unit, arguments, cache)
    engine = functools.partial(engines.run, directory=job.directory, options=options.engine_options)
    with Reporter("building examples", corpus.total_bytes, ("MB", "M tokens"), quiet) as reporter:
        for record in engine(options.engine, work, unfinished(), options.workers):
            records.append(record)
            tokens += record.counts["source_tokens"]
            done += record.counts["documents"]
            report()
        if not any(record.counts["rows"] for record in records if record.part == "train"):
            raise UnusableCorpus(summary.why_no_rows(records))
        manifest = job.finish(records, corpus.refused + splitter.skipped, cleaning)
    if not quiet:
        summary.print_summary(job, manifest, splitter, megabytes(), tokens, reporter.seconds())
        if cache is not None:
            summary.print_cache_summary(cache, arguments.tokenizer_hash, records)
    return manifest


def _default_unit_bytes(sources: Sequence[Source]) -> int:
    """A 16th of the corpus, from 1 to 8 MB: enough units to share out, each large enough to outweigh its overhead."""
    text_bytes = sum(source.bytes * (3 if source.path.endswith(COMPRESSED) else 1) for source in sources)
    return min(max(text_bytes // 16, MB), 8 * MB)


def main(arguments: Sequence[str]) -> None:
    options = build_options.parse(arguments)
    keep_freed()
    with keeping_units(Path(options.output)):
        build(options, quiet=False)
