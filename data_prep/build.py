"""Builds pretraining examples from text: `build` makes one part of a job (`build_share`) or all (`build_parts`).

`build_share` plans the job, runs its units on an engine, joins them into shards, and writes the manifest. `build_parts`
runs processes, here or on an engine (engines/), that read their own files and build one part each; then it merges the
parts.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import MANIFEST, PAIRS, PARTS, ShardTable, read_manifest
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import SUFFIXES as COMPRESSED
from bert_jax.storage.files import refuse_existing, write_atomic
from bert_jax.storage.remote import is_remote
from bert_jax.tokenization import tokenizer as tokenizers
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep import build_options, engines, joining, output_files, processes, summary, worker
from data_prep import job as jobs
from data_prep.build_options import NOT_COMPARED, Arguments, BuildOptions, Share
from data_prep.merge import merge
from data_prep.readers import datasets
from data_prep.readers.corpus import Corpus, Source, find_sources, patterns
from data_prep.sequences import fewest_documents
from data_prep.units import Unit, UnitSplitter, UnusableCorpus
from data_prep.worker import TokenCache, refuse_newlines

SHORT_SEQ_PROB = 0.1  # google-research/bert, create_pretraining_data.py
MB = 1_000_000
GB = 1_000_000_000
ARRIVING = "arriving"


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
    refuse_existing(output)
    return build_parts(options, output, parts, quiet=quiet)


def build_share(options: BuildOptions, *, quiet: bool = True, own: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Builds one part of a job, or a job without parts, and returns the manifest.

    Args:
        own: Further folders in which this job writes. If --input matches their files, they are skipped.

    Raises:
        UserError: As `build`.
    """
    output = Path(os.path.abspath(options.output))
    refuse_existing(output)
    (share,) = build_options.parse_share(options.part)
    # --part +K extends the output that has the tokenizer. Without this check, a share number that is taken would only
    # be noticed hours later, when the outputs are merged.
    folder = Path(os.path.abspath(options.tokenizer)).parent
    if not share.of and all((folder / name).exists() for name in (MANIFEST, output_files.SUMS)):
        taken = {held["number"] for held in build_options.manifest_shares(read_manifest(folder))}
        if share.number in taken:
            raise UserError(
                f"--part +{share.number}: {folder}, which has the --tokenizer, already has this share. Use --part "
                f"+{max(taken) + 1}, or name the tokenizer of the output that the text is added to"
            )
    if options.engine == "local":
        processes.begin(options.workers)  # starts while this process reads the tokenizer
    # Files that this job or an earlier run of it wrote are not text.
    sources = find_sources(str(options.input), options.weights, (*own, *jobs.own_folders(output)))
    tokenizer = tokenizers.load(options.tokenizer, options.lowercase)
    if options.newlines == "keep":
        refuse_newlines(tokenizer)
    arguments = _arguments(options, share, sources, tokenizer)
    # Other engines have their workers elsewhere, so this process reads for all of them with every core.
    readers = (options.workers if options.engine == "local" else 0) or processes.cores()
    corpus = Corpus(arguments.sources, dataclasses.replace(options, workers=readers))
    cleaning = summary.cleaning_reports(arguments.sources)
    cache = None
    if options.token_cache is not None:
        folder = Path(os.path.abspath(options.token_cache))
        cache = TokenCache(folder, round(options.token_cache_gb * GB), options.newlines)
        cache.prepare()
    with jobs.open_job(output, arguments, tokenizer) as job:
        return _run(job, corpus, cleaning, cache, quiet)


def _arguments(options: BuildOptions, share: Share, sources: tuple[Source, ...], tokenizer: Tokenizer) -> Arguments:
    """Adds defaults that depend on other options or on the text."""
    short_seq_prob = options.short_seq_prob
    if short_seq_prob is None:
        # Packing makes its own short sequences (`sequences.fill_gaps`). Rows hold only a few sequences, so more short
        # ones would leave rows unfilled.
        short_seq_prob = SHORT_SEQ_PROB if options.objective in PAIRS and options.pack == 1 else 0.0
    unit_bytes = round(options.unit_mb * MB)
    if not unit_bytes:
        # A 16th of the corpus: enough units to share out, each large enough to outweigh its overhead.
        text_bytes = sum(source.bytes * (3 if source.path.endswith(COMPRESSED) else 1) for source in sources)
        unit_bytes = min(max(text_bytes // 16, MB), 8 * MB)
    chosen, digest = build_options.share_sources(share, sources), build_options.digest(sources)
    return Arguments(options, short_seq_prob, unit_bytes, share, chosen, digest, tokenizer.content_hash)


def _run(
    job: jobs.Job, corpus: Corpus, cleaning: list[dict[str, Any]], cache: TokenCache | None, quiet: bool
) -> dict[str, Any]:
    """Splits the corpus, skips finished units, passes the others to the engine, and finishes the folder."""
    arguments, options, share = job.arguments, job.arguments.options, job.arguments.share
    fewest, numbering = fewest_documents(options.objective), (share.first_unit, share.is_divided)
    splitter = UnitSplitter(arguments.unit_bytes, options.eval_fraction, fewest, options.dedup, *numbering)
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
            if (record := jobs.read_record(job.directory, unit, joined)) is None:
                yield unit
            else:
                records.append(record)
                done += record.counts["documents"]
                before += record.counts["documents"]

    if (resumed := jobs.finished_units(job.directory)) and not quiet:
        print_note(f"resuming {job.directory}: {resumed} units are finished")
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
    # Records arrive in any order.
    records.sort(key=lambda record: (PARTS.index(record.part), record.number))
    groups = joining.plan(records, options.dupe_factor)
    shards = ShardTable.of_entries(joining.join_units(job.directory, options.format, groups, options.workers, quiet))
    manifest = job.finish(records, shards, corpus.refused + splitter.skipped, cleaning)
    if not quiet:
        summary.print_summary(job, manifest, splitter, megabytes(), tokens, reporter.seconds())
        if cache is not None:
            summary.print_cache_summary(cache, arguments.tokenizer_hash, records)
    return manifest


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
    for pattern in patterns(str(options.input)) if options.engine != "local" else ():
        # Engine workers have other current folders, in which they would look for a relative path.
        elsewhere = is_remote(pattern) or pattern.startswith(datasets.TFDS_PREFIX) or datasets.is_name(pattern)
        if not elsewhere and not os.path.isabs(pattern):
            raise UserError(
                f"--input {pattern}: the workers of an engine read the files of their parts themselves. Give an "
                "absolute path, or an address, that all of them and this machine can reach"
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
                for tokens in (_run_here if options.engine == "local" else _run_elsewhere)(options, missing, folder):
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


def build_part(part: BuildOptions, own: tuple[Path, ...] = ()) -> int:
    build_share(part, own=own)
    return int(read_manifest(Path(part.output))["counts"]["source_tokens"])


def _run_elsewhere(options: BuildOptions, missing: list[Share], folder: Path) -> Iterator[int]:
    """Builds parts on an engine's workers, and yields the token count of each as it finishes."""
    if not missing:
        return
    by_number = {share.number: share for share in missing}
    if options.token_cache is not None:  # workers have other current folders
        options = dataclasses.replace(options, token_cache=Path(os.path.abspath(options.token_cache)))
    # An engine runs units, so a part travels as a unit without text that has the part's number.
    work = functools.partial(build_elsewhere, options, by_number, folder)
    units = (Unit("train", number, (), "") for number in by_number)
    # Outputs arrive file by file in OUTPUT.parts/arriving. An earlier run may have left an incomplete one there.
    shutil.rmtree(folder / ARRIVING, ignore_errors=True)
    for share in missing:
        for name in (*PARTS, "tokenizer"):
            (folder / ARRIVING / _name(share) / name).mkdir(parents=True)
    tokenizers.load(options.tokenizer, options.lowercase).save(folder / "tokenizer")
    engine = functools.partial(engines.run, directory=folder, options=options.engine_options)
    for record in engine(options.engine, work, units, options.workers):
        # The record arrives last, so the output is complete and gets its name.
        name = _name(by_number[record.number])
        (folder / ARRIVING / name).rename(folder / name)
        yield record.counts["source_tokens"]


def build_elsewhere(
    options: BuildOptions, by_number: dict[int, Share], parts: Path, directory: Path, unit: Unit
) -> jobs.UnitRecord:
    """Builds the part with the unit's number in a job folder, on an engine's worker.

    `parts` is the folder with all parts, whose files --input may match.
    """
    share = by_number[unit.number]
    part = dataclasses.replace(
        options,
        part=f"{share.number}/{share.of}",
        output=directory / ARRIVING / _name(share),
        tokenizer=directory / "tokenizer",
        lowercase=None,
        workers=1,
        engine="local",
        engine_options="",
    )
    record = jobs.UnitRecord(unit.name, "", {"source_tokens": build_part(part, own=(parts,))}, {}, [])
    write_atomic(jobs.unit_folder(directory) / f"{record.name}.json", json.dumps(record._asdict()).encode())
    return record
