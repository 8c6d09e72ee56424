"""Converts shards to another format, from an output of build_examples or TFRecord files of the original scripts."""

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import Parser, UserError
from bert_jax.data.manifest import MANIFEST, PARTS, Part, is_output, read_manifest
from bert_jax.data.shards import Corrupt, check_sizes, layout_problem, value_problem
from bert_jax.progress import Reporter
from bert_jax.storage.local import atomic_folder, refuse_inside
from bert_jax.storage.remote import Folder, is_remote
from data_prep import checksums, formats, import_tfrecord, objectives

DESCRIPTION = """\
Converts shards to another format. The text is not needed again.

  bert-jax convert-examples --input data/books_tfrecord --output data/books
  bert-jax convert-examples --input 'pretraining/*.tfrecord' --tokenizer vocab.txt --output data/books

INPUT is an output of bert-jax build-examples in any format. Converted to arrow, it equals the folder that --format
arrow would have given, so training on either is the same. Or INPUT matches TFRecord files, plain or gzipped, that
google-research/bert's create_pretraining_data.py wrote, or a script with its field layout; then also give the tokenizer
that made them, and --eval_input for the rows to hold out. Such rows keep their masks.
"""


def convert(
    input: str | Path,
    output: str | Path,
    *,
    format: str = "arrow",
    tokenizer: str | Path | None = None,
    lowercase: bool | None = None,
    eval_input: str | None = None,
    objective: str | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Converts as the command does, and returns the new manifest.

    Raises UserError for an input that cannot be read, or rows that the format cannot hold.
    """
    output = Path(os.path.abspath(output))
    if (Path(input) / MANIFEST).exists():
        if (tokenizer, lowercase, eval_input, objective) != (None,) * 4:
            flags = "--tokenizer, --lowercase, --eval_input and --objective"
            raise UserError(f"{flags} are only for TFRecord files; leave them out for {input}, which has a manifest")
        refuse_inside(output, Path(os.path.abspath(input)))
        return _convert_output(Path(os.path.abspath(input)), output, format, quiet)
    folder_of_part = Path(input) if Path(input).is_dir() else Path(input).parent
    if folder_of_part.name in PARTS and is_output(folder_of_part.parent):
        whole = folder_of_part.parent
        raise UserError(f"{input} is a part of {whole}, an output of build_examples; give --input {whole}")
    if Path(input).is_dir():
        raise UserError(f"no {MANIFEST} in {input}. Name the files, for example '{input}/*.tfrecord', and --tokenizer")
    if tokenizer is None and is_remote(str(input)):
        raise UserError(
            f"{input} is in an object store. Copy shards to disk first (copy_examples); TFRecord files need --tokenizer"
        )
    if tokenizer is None:
        raise UserError(f"{input}: TFRecord files hold only ids; give the --tokenizer that made them")
    if objective is not None:
        objectives.check(objective)
    formats.check(format, "static", 1)
    with atomic_folder(output) as folder:
        patterns: dict[Part, str | None] = {"train": str(input), "eval": eval_input}
        manifest = import_tfrecord.convert(patterns, tokenizer, lowercase, objective, folder, format, quiet)
        checksums.write_with_manifest(folder, manifest)
    return manifest


def _convert_output(directory: Path, output: Path, format: str, quiet: bool) -> dict[str, Any]:
    manifest = read_manifest(directory)
    formats.check(format, manifest["masking"]["kind"], manifest["pack"])
    check_sizes(directory, manifest["shards"])
    read = formats.reader(manifest)
    listed = checksums.read(directory)
    shards = [shard["name"] for shard in manifest["shards"]]
    checksums.must_list(listed, [MANIFEST, manifest["unigram_counts"], *shards], str(directory / checksums.SUMS))
    written: list[dict[str, Any]] = []
    rates = ("rows",)
    with atomic_folder(output) as folder, Reporter("converting", manifest["counts"]["rows"], rates, quiet) as reporter:
        source, target = Folder(str(directory)), Folder(str(folder))
        for name in sorted(set(listed) - set(shards)):
            blocks = source.verified_blocks(name, listed[name])
            if name.startswith("tokenizer/") or name == manifest["unigram_counts"]:
                target.write(name, blocks)
            else:  # files of the manifest and of the format are only checked here, and written again
                deque(blocks, maxlen=0)
        for part in PARTS:
            (folder / part).mkdir()
        done = 0
        for shard in manifest["shards"]:
            path = directory / shard["name"]
            try:
                if checksums.sha256(path) != listed[shard["name"]]:
                    raise Corrupt(f"its sha256 differs from {checksums.SUMS}")
                rows = read(path)
            except Corrupt as error:
                raise UserError(f"damaged shard {path}: {error}; copy the folder again") from error
            if problem := layout_problem(rows, shard["rows"], manifest) or value_problem(rows, manifest):
                raise UserError(f"damaged shard {path}: {problem}; copy the folder again")
            written.append(formats.write(format, folder, shard.get("stem") or shard["name"].rsplit(".", 1)[0], rows))
            done += shard["rows"]
            reporter.update(done, done)
        manifest |= {"format": format, "shards": written}
        checksums.write_with_manifest(folder, manifest)
    return manifest


def main(arguments: Sequence[str]) -> None:
    parser = Parser("bert-jax convert-examples", DESCRIPTION)
    add = parser.add_argument
    add("--input", required=True, metavar="DIR_OR_GLOB", help="an output of build_examples, or TFRecord files")
    add("--output", required=True, metavar="DIR", help="the folder to create")
    add("--format", default="arrow", metavar="NAME", help="arrow, tfds or tfrecord; default arrow")
    add("--tokenizer", metavar="DIR_OR_VOCAB", help="for TFRecord files: the tokenizer that made their ids")
    parser.add_switch("lowercase", help="lower-case the text, or --nolowercase; for a vocab.txt only")
    add("--eval_input", metavar="GLOB", help="for TFRecord files: the files to hold out")
    add(
        "--objective",
        metavar="NAME",
        help="for TFRecord files: their objective; default nsp, or full_sentences without labels",
    )
    given = parser.parse_args(arguments)
    manifest = convert(**vars(given), quiet=False)
    train, held_out = (manifest["parts"][part]["rows"] for part in PARTS)
    print(f"{given.output}: {train} rows for training, {held_out} for evaluation, as {manifest['format']}")
