"""Text to rows for pretraining: `build` for notebooks, `python -m data_prep.build_examples` for a terminal."""

import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bert_jax import command
from bert_jax import tokenizer as tokenizers
from bert_jax.command import Stopped, UserError
from bert_jax.data.manifest import PAIRS
from bert_jax.progress import Reporter
from bert_jax.storage.compression import SUFFIXES as COMPRESSED
from bert_jax.storage.local import incomplete_path, refuse_existing
from data_prep import engines, flags, formats, summary, worker
from data_prep.job import Arguments, Job, UnitRecord, finished_units
from data_prep.memory import keep_freed
from data_prep.objectives import fewest_documents
from data_prep.readers import Corpus, Reading, Source, find_sources
from data_prep.token_cache import TokenCache
from data_prep.units import Cut, Unit, UnitSplitter, UnusableCorpus

SHORT_SEQ_PROB = 0.1  # google-research/bert, create_pretraining_data.py
MB = 1_000_000
GB = 1_000_000_000


def build(
    input: str | Path,
    tokenizer: str | Path,
    output: str | Path,
    seq_len: int,
    *,
    objective: str = "nsp",
    masking: str = "dynamic",
    mask_unit: str = "token",
    mask_rate: float = 0.15,
    mask_split: str | Sequence[float] = "0.8,0.1,0.1",
    random_tokens: str = "uniform",
    reorder_rate: float = 0.0,
    dupe_factor: int = 1,
    pack: int = 1,
    eval_fraction: float = 0.01,
    short_seq_prob: float | None = None,
    delete_rate: float = 0.0,
    insert_rate: float = 0.0,
    lowercase: bool | None = None,
    seed: int = 0,
    engine: str = "local",
    engine_options: str = "",
    format: str = "arrow",
    workers: int = 0,
    unit_mb: float = 0.0,
    weights: str | Sequence[float] = (),
    document: str = "blank_line",
    text_field: str = "text",
    dedup: bool = False,
    on_error: str = "fail",
    token_cache: str | Path | None = None,
    token_cache_gb: float = 50.0,
    quiet: bool = True,
) -> dict[str, Any]:
    """Builds the examples as the command does, and returns the manifest; see its --help for the arguments.

    With more than one worker, call it under `if __name__ == "__main__"` in a script, as multiprocessing needs.
    Raises UserError for a mistake in the arguments or the input; finished units are then kept for the next call.
    """
    flags.check_choices(objective, masking, mask_unit, engine)
    formats.check(format, masking, pack)
    split = flags.split(mask_split)
    flags.check_numbers(seq_len, mask_rate, dupe_factor, pack, eval_fraction, short_seq_prob, seed, workers, unit_mb)
    flags.check_rates(delete_rate, insert_rate, token_cache_gb)
    if objective not in PAIRS and short_seq_prob:
        raise UserError(f"--short_seq_prob is for --objective {' and '.join(PAIRS)}; {objective} makes none short")
    output = Path(os.path.abspath(output))
    refuse_existing(output)
    engines.begin(engine, workers)
    sources = _without(find_sources(str(input), flags.weights(weights)), incomplete_path(output))
    corpus = Corpus(sources, Reading(text_field, document, on_error))
    loaded = tokenizers.load(tokenizer, lowercase)
    if short_seq_prob is None:
        # Packing makes short sequences of its own (split_for_packing.py). More of them would not fill rows that hold
        # few sequences.
        short_seq_prob = SHORT_SEQ_PROB if objective in PAIRS and pack == 1 else 0.0
    arguments = Arguments(
        objective=objective,
        seq_len=seq_len,
        masking=masking,
        mask_unit=mask_unit,
        mask_rate=mask_rate,
        mask_split=split,
        random_tokens=random_tokens,
        reorder_rate=reorder_rate,
        dupe_factor=dupe_factor,
        pack=pack,
        format=format,
        eval_fraction=eval_fraction,
        short_seq_prob=short_seq_prob,
        delete_rate=delete_rate,
        insert_rate=insert_rate,
        seed=seed,
        unit_bytes=round(unit_mb * MB) if unit_mb else _default_unit_bytes(corpus.sources),
        tokenizer_hash=loaded.content_hash,
        sources=corpus.sources,
        text_field=text_field,
        document=document,
        dedup=dedup,
    )
    _check_masking(arguments)
    cache = None
    if token_cache is not None:
        cache = TokenCache(Path(os.path.abspath(token_cache)), round(token_cache_gb * GB))
        cache.prepare()
    with Job(output, arguments, loaded) as job:
        return _run(job, corpus, engine, engine_options, workers, cache, quiet)


def _run(
    job: Job, corpus: Corpus, engine: str, engine_options: str, workers: int, cache: TokenCache | None, quiet: bool
) -> dict[str, Any]:
    """Splits, skips what is finished, sends the rest to the engine, and finishes the folder."""
    arguments = job.arguments
    worker.keep(job.directory, job.tokenizer)
    cut = Cut(arguments.unit_bytes, arguments.eval_fraction, fewest_documents(arguments.objective))
    splitter = UnitSplitter(cut, arguments.dedup)
    records: list[UnitRecord] = []
    tokens = done = 0

    def tell() -> None:
        """An engine may read far ahead: as done counts the share of what is read that is in finished units."""
        share = done / max(splitter.documents, 1)
        reporter.update(corpus.bytes_read * share, splitter.bytes / MB * share, tokens / 1e6)

    def unfinished() -> Iterator[Unit]:
        nonlocal done
        try:
            for unit in splitter.split(reported()):
                record = job.finished(unit)
                if record is None:
                    yield unit
                else:
                    records.append(record)
                    done += record.counts["documents"]
        except UnusableCorpus as error:
            raise _with_skipped(error, corpus.refused + splitter.skipped) from None

    def reported() -> Iterator[bytes | None]:
        for document in corpus.texts():
            tell()
            yield document

    resumed = finished_units(job.directory)
    if resumed and not quiet:
        print(f"going on in {job.directory}: {resumed} units are finished", file=sys.stderr)
    with Reporter("building examples", corpus.total_bytes, ("MB", "M tokens"), quiet) as reporter:
        work = functools.partial(worker.build_unit, arguments, cache)
        for record in engines.run(engine, work, unfinished(), workers, directory=job.directory, options=engine_options):
            records.append(record)
            tokens += record.counts["source_tokens"]
            done += record.counts["documents"]
            tell()
        if not any(record.counts["rows"] for record in records if record.part == "train"):
            raise UnusableCorpus(summary.nothing(records))
        manifest = job.finish(records, corpus.refused + splitter.skipped)
    if not quiet:
        summary.tell(job, manifest, splitter, tokens, reporter.seconds())
        if cache is not None:
            summary.tell_of_cache(cache, arguments.tokenizer_hash, records)
    return manifest


def _check_masking(arguments: Arguments) -> None:
    rule = arguments.rule  # raises for what is no rule
    if rule.random == "unigram" and arguments.masking == "static":
        raise UserError("--random_tokens unigram needs --masking dynamic: the counts are known when the job has ended")


def _with_skipped(error: UnusableCorpus, skipped: Counter[str]) -> UnusableCorpus:
    return UnusableCorpus(f"{error}; skipped: {summary.told(skipped)}") if skipped else error


def _without(sources: Sequence[Source], folder: Path) -> tuple[Source, ...]:
    """The sources that are not in a folder: a pattern may name what an earlier run of this job left, too."""
    inside = os.path.realpath(folder) + os.sep
    return tuple(source for source in sources if not os.path.realpath(source.path).startswith(inside))


def _default_unit_bytes(sources: Sequence[Source]) -> int:
    """A 16th of the corpus, from 1 to 8 MB: enough units to share out, each long enough that its own cost is small."""
    text_bytes = sum(source.bytes * (3 if source.path.endswith(COMPRESSED) else 1) for source in sources)
    return min(max(text_bytes // 16, MB), 8 * MB)


def main(arguments: Sequence[str]) -> None:
    keywords = flags.parse(arguments)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stopping is under way, and another one would tear it
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    keep_freed()
    try:
        build(**keywords, quiet=False)
    except Stopped as stopped:
        directory = incomplete_path(Path(keywords["output"]))
        if finished_units(directory):
            kept = f"finished units are kept in {directory}: run the same command again to go on"
            raise Stopped(f"{stopped}; {kept}") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    command.run(main)
