"""Builds pretraining examples from text: `build` makes one part of a job (`build_share`) or all (`build_parts`).

`build_share` plans the job, runs its units, joins them into shards, and writes the manifest. On this machine, one
process reads the text and processes do the rest; for an engine or an output in a store, workers do it all (cluster.py).
`build_parts` runs processes that read their own files and build one part each; then it merges the parts.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import MANIFEST, PAIRS, PARTS, ShardTable, read_manifest
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import refuse_existing
from bert_jax.storage.remote import as_address, is_remote
from bert_jax.tokenization import tokenizer as tokenizers
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep import build_options, cluster, engines, joining, output_files, processes, summary, worker
from data_prep import job as jobs
from data_prep.build_options import NOT_COMPARED, Arguments, BuildOptions, Share
from data_prep.merge import merge
from data_prep.readers.corpus import Corpus, Source, find_sources, text_bytes
from data_prep.sequences import fewest_documents
from data_prep.units import Unit, UnitSplitter, UnusableCorpus
from data_prep.worker import TokenCache, refuse_newlines

SHORT_SEQ_PROB = 0.1  # google-research/bert, create_pretraining_data.py
# Held out by default. 1% of terabytes would be billions of tokens, which every evaluation reads.
EVAL_FRACTION, EVAL_TOKENS = 0.01, 10_000_000
BYTES_A_TOKEN = 4  # of English text in a vocabulary of 30,000 tokens; most other texts have more bytes
MB = 1_000_000
GB = 1_000_000_000


def build(options: BuildOptions, *, quiet: bool = True) -> dict[str, Any]:
    """Builds the examples as the command does, and returns the manifest.

    With more than one worker, call it under `if __name__ == "__main__"` in a script, as multiprocessing requires.

    Raises:
        UserError: The options or the input have a mistake. Finished units are kept for the next call.
    """
    parts = build_options.parse_share(options.part)
    if len(parts) == 1:
        return build_share(options, quiet=quiet)
    output = Path(os.path.abspath(options.output))
    return build_parts(options, output, parts, quiet=quiet)


def build_share(options: BuildOptions, *, quiet: bool = True) -> dict[str, Any]:
    """Builds one part of a job, or a job without parts, and returns the manifest.

    Raises:
        UserError: As `build`.
    """
    output = Path(os.path.abspath(options.output))
    is_here = options.engine == "local" and not is_remote(output)
    if not is_remote(output):
        refuse_existing(output)
    elif options.format != "arrow":
        raise UserError(f"--format {options.format} needs a local --output. Copy the folder when it is complete")
    (share,) = build_options.parse_share(options.part)
    # --part +K extends the output that has the tokenizer. Without this check, a share number that is taken would only
    # be noticed hours later, when the outputs are merged.
    folder = Path(os.path.abspath(options.tokenizer)).parent
    if not share.of and all((folder / name).exists() for name in (MANIFEST, output_files.SUMS)):
        extended = read_manifest(folder)
        taken = {held["number"] for held in build_options.manifest_shares(extended)}
        if share.number in taken:
            raise UserError(
                f"--part +{share.number}: {folder}, which has the --tokenizer, already has this share. Use --part "
                f"+{max(taken) + 1}, or name the tokenizer of the output that the text is added to"
            )
        if options.eval_fraction is None:  # merge-shards joins outputs with the same share only
            options = dataclasses.replace(options, eval_fraction=extended["eval_fraction"])
    if options.engine == "local":
        processes.begin(options.workers)  # starts while this process reads the tokenizer
    # Files that this job or an earlier run of it wrote are not text.
    sources = find_sources(str(options.input), options.weights, jobs.own_folders(output))
    engine = engines.choose(options.engine, options.workers, options.engine_options)
    tokenizer = tokenizers.load(options.tokenizer, options.lowercase)
    if options.newlines == "keep":
        refuse_newlines(tokenizer)
    arguments = _arguments(options, share, sources, tokenizer, quiet)
    readers = dataclasses.replace(options, workers=options.workers or processes.cores())
    cleaning = summary.cleaning_reports(arguments.sources)
    cache = None
    if options.token_cache is not None:
        folder = Path(os.path.abspath(options.token_cache))
        cache = TokenCache(folder, round(options.token_cache_gb * GB), options.newlines)
        cache.prepare()
    if is_here:
        with jobs.open_job(output, arguments, tokenizer) as job:
            return _run(job, Corpus(arguments.sources, readers), cleaning, cache, quiet)
    corpus = cluster.ListedCorpus(arguments.sources, readers)
    open_job = cluster.open_job if is_remote(output) else jobs.open_job
    with open_job(output, arguments, tokenizer) as job:
        address = as_address(output) if is_remote(output) else str(job.directory)
        ranges = cluster.ranges(arguments.sources, options)
        site = cluster.Site(address, os.urandom(8).hex(), arguments, ranges, cache)
        workers = cluster.Cluster(job, site, engine)
        workers.read(quiet)
        corpus.open(site)
        manifest = _run(job, corpus, cleaning, cache, quiet, workers)
        if is_remote(output):
            workers.publish(manifest)
        return manifest


def _arguments(
    options: BuildOptions, share: Share, sources: tuple[Source, ...], tokenizer: Tokenizer, quiet: bool
) -> Arguments:
    """Adds defaults that depend on other options or on the text."""
    short_seq_prob = options.short_seq_prob
    if short_seq_prob is None:
        # Packing makes its own short sequences (`sequences.fill_gaps`). Rows hold only a few sequences, so more short
        # ones would leave rows unfilled.
        short_seq_prob = SHORT_SEQ_PROB if options.objective in PAIRS and options.pack == 1 else 0.0
    eval_fraction = held_out_share(sources, options.dupe_factor)
    if options.eval_fraction is not None:
        eval_fraction = options.eval_fraction
    elif eval_fraction < EVAL_FRACTION and not quiet:
        print_note(
            f"{eval_fraction:.3%} of the documents are held out, about {EVAL_TOKENS / 1e6:.0f} M tokens "
            f"(--eval_fraction {EVAL_FRACTION} for 1%)"
        )
    unit_bytes = round(options.unit_mb * MB)
    if not unit_bytes:
        # A 16th of the corpus: enough units to share out, each large enough to outweigh its overhead.
        unit_bytes = min(max(text_bytes(sources) // 16, MB), 8 * MB)
    chosen, digest = build_options.share_sources(share, sources), build_options.digest(sources)
    return Arguments(options, short_seq_prob, eval_fraction, unit_bytes, share, chosen, digest, tokenizer.content_hash)


def held_out_share(sources: Sequence[Source], dupe_factor: int = 1) -> float:
    """The share of documents that is held out by default: EVAL_FRACTION, or less for EVAL_TOKENS in about."""
    # All parts of a job have the same sources here, so they hold out the same documents.
    tokens = sum(text_bytes([source]) * source.weight for source in sources) * dupe_factor / BYTES_A_TOKEN
    return min(EVAL_FRACTION, float(f"{EVAL_TOKENS / max(tokens, 1):.3g}"))


def _run(
    job: jobs.Job,
    corpus: Corpus,
    cleaning: list[dict[str, Any]],
    cache: TokenCache | None,
    quiet: bool,
    elsewhere: cluster.Cluster | None = None,
) -> dict[str, Any]:
    """Splits the corpus, skips finished units, has the others built here or elsewhere, and finishes the folder."""
    arguments, options, share = job.arguments, job.arguments.options, job.arguments.share
    fewest, numbering = fewest_documents(options.objective), (share.first_unit, share.is_divided)
    splitter = UnitSplitter(arguments.unit_bytes, arguments.eval_fraction, fewest, options.dedup, *numbering)
    records: list[jobs.UnitRecord] = []
    joined = joining.joined_files(job.directory)
    tokens = 0  # in units finished by this run
    done = before = 0  # documents in finished units, and in units finished by an earlier run

    def report() -> None:
        # Progress counts documents in finished units, because an engine may read far ahead of them.
        documents = max(splitter.documents, 1)
        reporter.skip(corpus.bytes_read * before / documents)
        reporter.update(corpus.bytes_read * done / documents, megabytes(), tokens / 1e6)

    def megabytes() -> float:
        # The text in units finished by this run.
        return splitter.bytes / MB * (done - before) / max(splitter.documents, 1)

    # A generator: units are cut when an engine asks for one, so memory holds neither the text nor a list of units.
    def unfinished() -> Iterator[Unit]:
        nonlocal done, before
        for unit in _units(splitter, corpus, arguments, report):
            record = elsewhere.finished(unit) if elsewhere else jobs.read_record(job.directory, unit, joined)
            if record is None:
                yield unit
            else:
                records.append(record)
                done += record.counts["documents"]
                before += record.counts["documents"]

    resumed = elsewhere.resumed if elsewhere else jobs.finished_units(job.directory)
    if resumed and not quiet:
        print_note(f"resuming {as_address(job.output)}: {resumed} units are finished")
    work = functools.partial(worker.build_unit, arguments, cache)
    with Reporter("building examples", corpus.total_bytes, ("MB", "M tokens"), quiet) as reporter:
        here = functools.partial(processes.run_units, work, workers=options.workers, directory=job.directory)
        for record in elsewhere.run(unfinished()) if elsewhere else here(unfinished()):
            records.append(record)
            tokens += record.counts["source_tokens"]
            done += record.counts["documents"]
            report()
        if not any(record.counts["rows"] for record in records if record.part == "train"):
            raise UnusableCorpus(summary.why_no_rows(records))
    # Records arrive in any order.
    records.sort(key=lambda record: (PARTS.index(record.part), record.number))
    shards = _join(job, records, elsewhere, quiet)
    manifest = job.finish(records, shards, corpus.refused + splitter.skipped, cleaning)
    if not quiet:
        summary.print_summary(job, manifest, splitter, megabytes(), tokens, reporter.seconds())
        if cache is not None:
            summary.print_cache_summary(cache, arguments.tokenizer_hash, records)
    return manifest


def _join(job: jobs.Job, records: list[jobs.UnitRecord], elsewhere: cluster.Cluster | None, quiet: bool) -> ShardTable:
    """Joins the rows of units into shards, here or elsewhere."""
    options = job.arguments.options
    groups = joining.plan(records, options.dupe_factor)
    if elsewhere:
        return ShardTable.of_entries(elsewhere.join(groups, quiet))
    return ShardTable.of_entries(joining.join_units(job.directory, options.format, groups, options.workers, quiet))


def _units(
    splitter: UnitSplitter, corpus: Corpus, arguments: Arguments, on_document: Callable[[], None]
) -> Iterator[Unit]:
    """Splits the corpus into units. Adds the skipped documents to the message of UnusableCorpus."""

    def documents() -> Iterator[bytes | None]:
        for document in corpus.texts():
            on_document()
            yield document

    # The unit numbers from `limit` on belong to the next share.
    part, limit = arguments.options.part, arguments.share.first_unit + build_options.UNITS
    try:
        for unit in splitter.split(documents()):
            if part and unit.number >= limit:
                raise UserError(
                    f"a part has at most {build_options.UNITS} units. Use more parts, or a larger --unit_mb"
                )
            yield unit
    except UnusableCorpus as error:
        reason = str(error)
        if arguments.share.is_divided:
            reason = f"the files of --part {part} have too few documents. Use fewer parts"
        skipped = summary.listed(corpus.refused + splitter.skipped)
        raise UnusableCorpus(f"{reason}; skipped: {skipped}" if skipped else reason) from None


def build_parts(options: BuildOptions, output: Path, shares: list[Share], *, quiet: bool) -> dict[str, Any]:
    """Builds --part all/N as N parts in OUTPUT.parts, which a later run resumes, and returns the merged manifest.

    Raises:
        UserError: The options or the input have a mistake, or the system killed a process.
    """
    if options.engine != "local" or is_remote(output):
        raise UserError(
            f"--part {options.part} is for processes on this machine. Leave it out with --engine beam or ray and with "
            "an --output in a store: their workers share out the files in any case"
        )
    folder = jobs.parts_folder(output)
    # Mistakes common to all parts are found here, before any part starts.
    sources = find_sources(str(options.input), options.weights, jobs.own_folders(output))
    for share in shares:
        build_options.share_sources(share, sources)
    tokenizer = tokenizers.load(options.tokenizer, options.lowercase)
    # Everything that decides the bytes of the parts, as JSON values.
    values = {name: value for name, value in vars(options).items() if name not in NOT_COMPARED}
    values |= {"unit_mb": options.unit_mb, "sources": sources, "tokenizer_hash": tokenizer.content_hash}
    arguments = json.loads(json.dumps(values, default=str))
    with jobs.open_folder(folder):
        folders = {share: folder / _name(share) for share in shares}
        missing = [share for share in shares if not (folders[share] / MANIFEST).exists()]
        try:
            jobs.check_arguments(folder, arguments, begun=len(missing) < len(shares))
            with Reporter("building parts", len(missing), ("parts", "M tokens"), quiet) as reporter:
                for tokens in _run_here(options, missing, folder):
                    reporter.advance(1, 1, tokens / 1e6)
        finally:
            if not any(folder.glob("*-of-*")):  # no part has begun, so there is nothing to resume
                shutil.rmtree(folder, ignore_errors=True)
        manifest = merge(list(folders.values()), output, quiet=quiet)
        shutil.rmtree(folder)
    return manifest


def _name(share: Share) -> str:
    return f"{share.number}-of-{share.of}"


def _run_here(options: BuildOptions, missing: list[Share], folder: Path) -> Iterator[int]:
    """Builds parts on this machine, and yields the token count of each as it finishes."""
    # One worker a part: parts run at the same time instead.
    parts = [
        dataclasses.replace(options, part=f"{share.number}/{share.of}", output=folder / _name(share), workers=1)
        for share in missing
    ]
    workers = min(options.workers or processes.cores(), len(parts))
    if workers <= 1:
        yield from map(build_part, parts)
        return
    with processes.open_pool(workers) as pool:
        try:
            for future in as_completed([pool.submit(build_part, part) for part in parts]):
                yield future.result()
        except BaseException:
            # Finished units are kept, so the processes may stop at any instant.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def build_part(part: BuildOptions) -> int:
    build_share(part)
    return int(read_manifest(Path(part.output))["counts"]["source_tokens"])
