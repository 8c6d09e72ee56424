"""Reads, splits and segments randomly damaged files, and builds examples from some of them.

    python tests/tools/fuzz_readers.py --inputs 10000 --builds 50 --tokenizer DIR [--seed 0]

For each input, nothing but a UserError of one line may be raised, and only with on_error fail. The documents read and
refused must add up to all documents, counted independently where possible. Prints the number of refusals by reason.
"""

import argparse
import bz2
import contextlib
import csv
import gzip
import html
import importlib.util
import io
import json
import lzma
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers.corpus import Corpus, Reading, find_sources
from data_prep.sentences import document_sentences
from data_prep.units import UnitSplitter, UnusableCorpus

TEXTS = [
    "Mr. Smith went to the U.S. in 1914. He stayed there.\nA second line, with «quotes» and so on...",
    "Das ist der 4. Mai. Er kam z. B. mit Dr. Müller.\r\nUnd dann?",
    "彼は言った。「はい。」そして去った。",
    "¿Quién es? ¡No lo sé! \u3000\nयह एक वाक्य है। बी. सी. में।",
    "ภาษาไทยไม่มีเครื่องหมายจบประโยค " * 4 + "\x85 \u2028 x",
    "One. Two! Three? " * 20,
]
INSERTIONS = [b"\0", b"\xff", b"\xc3", b"\n", b"\n\n", b"\r\n", b"\r", b"\x1b", b"\xef\xbb\xbf"]
INSERTIONS += [b'"', b"}", b"\\ud800", b"\\u0000"]
INSERTIONS += [b"<", b"</text>", b"<!--", b"{{", b"WARC/1.0\r\n", b",", b"Content-Length: 5\r\n"]
INSERTIONS += [b"{", b"[" * 3000, b"  \n", b"\xe3\x80\x80\n", b"9" * 5000, b"null", b"\x7f", b"\xed\xa0\x80"]


def seeds() -> dict[str, bytes]:
    """Returns small files of every kind, by name."""
    table = pa.table({"text": pa.array([*TEXTS, None, ""] * 3), "id": range(3 * (len(TEXTS) + 2))})
    parquet = [io.BytesIO(), io.BytesIO()]
    for file, checksums in zip(parquet, (True, False), strict=True):
        pq.write_table(table, file, row_group_size=10, write_page_checksum=checksums)
    arrow = io.BytesIO()
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows([("id", "text"), *((1, text) for text in TEXTS * 2)])
    plain = {
        "text.txt": "\n\n".join(TEXTS * 2).encode(),
        "text.jsonl": "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS * 2).encode(),
        "checksums.parquet": parquet[0].getvalue(),
        "none.parquet": parquet[1].getvalue(),
        "text.arrow": arrow.getvalue(),
        "text.csv": rows.getvalue().encode(),
    }
    if importlib.util.find_spec("resiliparse"):
        plain["text.warc"] = b"".join(map(warc_record, TEXTS * 2))
    if importlib.util.find_spec("mwparserfromhell"):
        plain["text.xml"] = f"<mediawiki>{''.join(map(wiki_page, TEXTS * 2))}</mediawiki>".encode()
    compressors = {"": bytes, ".bz2": bz2.compress, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
    return {name + suffix: press(content) for name, content in plain.items() for suffix, press in compressors.items()}


def warc_record(text: str) -> bytes:
    body = f"<html><body><p>{text}</p></body></html>".encode()
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + body
    fields = f"WARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: {len(block)}\r\n"
    return f"WARC/1.0\r\n{fields}\r\n".encode() + block + b"\r\n\r\n"


def wiki_page(text: str) -> str:
    markup = f"{{{{Box|a={text}}}}}\n'''{text}''' [[link|{text}]]\n== Title ==\n* {text}"
    return f"<page><title>A</title><ns>0</ns><revision><text>{html.escape(markup)}</text></revision></page>\n"


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


def mutate(content: bytes, generator: random.Random) -> bytes:
    """Makes one to four changes: flips, truncates, removes, inserts or repeats bytes."""
    changed = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(changed) + 1)
        end = position + generator.choice((1, 2, 8, 100))
        match generator.randrange(6):
            case 0:
                changed[position : position + 1] = bytes([generator.randrange(256)])
            case 1:
                del changed[position:]
            case 2:
                del changed[position:end]
            case 3:
                changed[position:position] = generator.choice(INSERTIONS)
            case 4:
                changed[position:position] = changed[position:end]
            case 5:
                for _ in range(8):
                    if changed:
                        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


# What is counted with any on_error, because it is no error.
ALWAYS = {"empty_text", "not_a_page", "not_an_article"}


def documents_by_line(name: str, content: bytes) -> int | None:
    """Counts the documents of a file line by line; returns None for formats where that is not possible."""
    content = re.sub(rb"\r?\r\n|\r", b"\n", content)  # CR, CRLF and CRCRLF are line ends, too
    if name == "text.jsonl":
        return sum(1 for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())
    if name != "text.txt":
        return None
    found, inside = 0, False
    # Bytes that are not UTF-8 represent themselves, and are not white space.
    for line in content.decode("utf-8", "surrogateescape").removeprefix("\ufeff").split("\n"):
        blank = not line or line.isspace()
        found += inside < (not blank)
        inside = not blank
    return found


def check(path: Path, generator: random.Random) -> Counter[str]:
    """Reads one file with both settings of on_error. Returns refusals by reason, and the number of used documents."""
    skipping = Corpus(find_sources(str(path)), Reading(on_error="skip"))
    splitter = UnitSplitter(
        generator.choice((50, 10**6)), generator.choice((0.0, 0.3)), 1, dedup=generator.random() < 0.5
    )
    with contextlib.suppress(UnusableCorpus):
        units = list(splitter.split(skipping.texts()))
        documents = [document for unit in units for document in unit.documents]
        assert len(documents) == splitter.documents
        for document in documents:
            text = document.decode()
            assert "".join("".join(document_sentences(text)).split()) == "".join(text.split())
    counts = skipping.refused + splitter.skipped
    expected = documents_by_line(path.name, path.read_bytes())
    if expected:
        assert splitter.documents + counts.total() == expected, f"{splitter.documents} + {counts}, not {expected}"
    counts["used"] = splitter.documents
    try:
        read = sum(1 for _ in Corpus(find_sources(str(path))).documents())
        assert not set(skipping.refused) - ALWAYS and read == splitter.documents + splitter.skipped.total()
    except UserError as error:
        assert set(skipping.refused) - ALWAYS and "\n" not in str(error), error
    return counts


def check_build(path: Path, folder: Path, tokenizer: Path, generator: random.Random) -> None:
    """Builds examples from one file, and checks that the counts of the manifest add up."""
    objective = generator.choice(("nsp", "full_sentences", "doc_sentences"))
    options = {"objective": objective, "seq_len": 32, "workers": 1, "eval_fraction": 0.2, "on_error": "skip"}
    with tempfile.TemporaryDirectory(dir=folder) as output:
        try:
            manifest = build(
                BuildOptions(path, tokenizer, Path(output) / "out", dedup=generator.random() < 0.5, **options)
            )
        except UserError as error:
            assert "\n" not in str(error), error
            return
    counts = manifest["counts"]
    assert counts["documents"] == counts["used"] + sum(counts["skipped"].values()), counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--builds", type=int, default=0, help="number of inputs from which examples are built, too")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder for --builds")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    total: Counter[str] = Counter()
    files = list(seeds().items())
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.inputs):
            generator = random.Random(f"{given.seed} {number}")
            name, content = files[number % len(files)]
            path = Path(folder) / name
            path.write_bytes(mutate(content, generator))
            try:
                total += check(path, generator)
                if number < given.builds:
                    check_build(path, Path(folder), given.tokenizer, generator)
            except BaseException:
                print(f"input {number} ({name}) of seed {given.seed}: {path.read_bytes()[:2000]!r}")
                raise
    print(json.dumps(dict(sorted(total.items()))))


if __name__ == "__main__":
    main()
