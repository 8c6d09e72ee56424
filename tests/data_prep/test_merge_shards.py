"""Parts of a job that are built apart and merged equal one job, byte for byte; text added later changes no row."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizer_kinds
from building import ROOT, contents
from tokenizer_kinds import unspaced_documents

from bert_jax.commands import inspect_shards
from bert_jax.commands.merge_shards import folders, main
from bert_jax.data.manifest import read_manifest
from bert_jax.errors import UserError
from bert_jax.storage.files import MARKER
from data_prep import build as build_parts
from data_prep import build_options
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.merge import merge
from data_prep.readers import corpus as readers
from data_prep.readers.corpus import Source
from tests.helpers import shard_tables

BOOKS = sorted((ROOT / "data_prep" / "sample" / "books").glob("*.txt.xz"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Five files of 30 documents, each of a few sentences of a novel."""
    folder = tmp_path_factory.mktemp("text")
    lines = (line for document in readers.documents(BOOKS[0]) for line in document.splitlines())
    paragraphs = [line for line in lines if len(line) > 200]
    for number in range(5):
        chosen = paragraphs[number * 30 : number * 30 + 30]
        assert len(chosen) == 30
        (folder / f"file{number}.txt").write_text("\n\n".join(chosen) + "\n")
    return folder


def options(text: Path, vocab: Path, output: Path, part: str = "", **changes: object) -> BuildOptions:
    given = {"input": text / "file*.txt", "seq_len": 64, "eval_fraction": 0.2, "workers": 1, "unit_mb": 0.01, "seed": 3}
    return BuildOptions(**({"tokenizer": vocab, "output": output, "part": part} | given | changes))


@pytest.mark.parametrize("pack", [1, 4])
def test_parts_merged_equal_one_job(text, vocab_dir, tmp_path, pack):
    whole = build(options(text, vocab_dir, tmp_path / "whole", "all/3", pack=pack))
    for number in range(3):
        build(options(text, vocab_dir, tmp_path / f"part{number}", f"{number}/3", pack=pack))
    assert not (tmp_path / "whole.parts").exists()
    merged = merge([tmp_path / f"part{number}" for number in (2, 0, 1)], tmp_path / "merged")
    assert merged == whole == read_manifest(tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert [share["number"] for share in whole["shares"]] == [0, 1, 2]
    assert sum(share["documents"] for share in whole["shares"]) == 150 == whole["counts"]["documents"]
    inspect_shards.main([str(tmp_path / "merged"), "--verify"])


@pytest.mark.parametrize("separator", ["", "---"])
def test_parts_print_what_one_job_prints(vocab_dir, tmp_path, capsys, separator):
    """Skipped documents, unknown words, short documents, no rows for evaluation, a separator that separates nothing."""
    for number, name in enumerate("ab", 1):
        text = f"A cat {name} sat.\n\n" * 2 + f"A dog {name} ran.\n\n" + "\u200b" * number
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]))
    given = {"dedup": True, "eval_fraction": 1e-9, "objective": "single", "document_separator": separator}
    told = []
    for output, part in (("whole", ""), ("parts", "all/2")):
        made = options(tmp_path, words, tmp_path / output, part, input=tmp_path / "[ab].txt", **given)
        build(made, quiet=False)
        lines = capsys.readouterr().err.splitlines()
        told.append([line for line in lines if line.startswith(("warning", "skipped", "no document"))])
    assert told[0] == told[1]
    wanted = ["no document was chosen for eval", "warning: --document_separator", "of the text is [UNK]: does"]
    if not separator:
        wanted[1:2] = ["skipped: 2 duplicate, 2 no_tokens", "warning: 100% of the documents have one sentence"]
    assert all(part in line for part, line in zip(wanted, told[0], strict=True))


@pytest.fixture
def building(monkeypatch):
    """Makes a job fail at the part after `parts` ones, and returns the list of the parts that are built."""
    original, built = build_parts.build_part, []

    def start(parts: int) -> list[str]:
        def build_part(part: BuildOptions) -> int:
            if len(built) == parts:
                raise UserError("the disk is full")
            built.append(part.part)
            return original(part)

        monkeypatch.setattr(build_parts, "build_part", build_part)
        return built

    return start


@pytest.mark.slow
def test_all_parts_run_side_by_side_and_are_resumed(text, vocab_dir, tmp_path, building):
    whole = build(options(text, vocab_dir, tmp_path / "whole", "all/4"))
    assert build(options(text, vocab_dir, tmp_path / "two", "all/4", workers=2)) == whole
    assert contents(tmp_path / "two") == contents(tmp_path / "whole")
    building(2)
    with pytest.raises(UserError, match="the disk is full"):
        build(options(text, vocab_dir, tmp_path / "three", "all/4"))
    assert not (tmp_path / "three").exists() and len(list((tmp_path / "three.parts").glob("*-of-4"))) == 2
    built = building(5)
    build(options(text, vocab_dir, tmp_path / "three", "all/4"))
    assert built == ["0/4", "1/4", "2/4", "3/4"] and not (tmp_path / "three.parts").exists()
    assert contents(tmp_path / "three") == contents(tmp_path / "whole")


def test_parts_are_for_this_machine(text, vocab_dir, tmp_path):
    for output, engine in ((tmp_path / "out", "beam"), (Path("gs://bucket/out"), "local")):
        with pytest.raises(UserError, match="--part all/2 is for processes on this machine"):
            build(options(text, vocab_dir, output, "all/2", engine=engine))


def test_added_text_changes_no_row_of_the_first_output(text, vocab_dir, tmp_path):
    first = build(options(text, vocab_dir, tmp_path / "first", input=text / "file[0-3].txt"))
    more = options(text, vocab_dir, tmp_path / "more", "+1", input=text / "file4.txt", unit_mb=0.02)
    build(more)
    main(["--input", f"{tmp_path / 'first'},{tmp_path / 'more'}", "--output", str(tmp_path / "both")])
    both = read_manifest(tmp_path / "both")
    assert both["shards"]["count"] > first["shards"]["count"]
    for shard in shard_tables.entries(tmp_path / "first"):
        assert (tmp_path / "both" / shard["name"]).read_bytes() == (tmp_path / "first" / shard["name"]).read_bytes()
    assert (
        both["counts"]["documents"] == 150 and both["parts"]["eval"]["documents"] > first["parts"]["eval"]["documents"]
    )
    assert [(share["number"], share["of"], share["documents"]) for share in both["shares"]] == [(0, 0, 120), (1, 0, 30)]
    inspect_shards.main([str(tmp_path / "both"), "--verify"])
    # The held-out documents are those of a job on all of the text.
    at_once = build(options(text, vocab_dir, tmp_path / "at_once"))
    assert both["parts"]["eval"]["documents"] == at_once["parts"]["eval"]["documents"]
    with pytest.raises(UserError, match=r"are both share 1\. Build one of them with --part \+2"):
        merge([tmp_path / "both", tmp_path / "more"], tmp_path / "three")
    with pytest.raises(UserError, match=r"--part \+1: .*both, .* already has this share\. Use --part \+2, or"):
        build(options(text, vocab_dir, tmp_path / "three", "+1", tokenizer=tmp_path / "both" / "tokenizer"))
    assert not (tmp_path / "three").exists()


def test_links_to_shards_are_merged_as_their_files(text, vocab_dir, tmp_path):
    """A download of the Hugging Face Hub holds relative links to its cache."""
    for part in ("0/2", "1/2"):
        build(options(text, vocab_dir, tmp_path / "cache" / part[0], part))
        for path in (tmp_path / "cache" / part[0]).rglob("*"):
            if path.is_file():
                link = tmp_path / "linked" / path.relative_to(tmp_path / "cache")
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(path, link.parent))
    merge([tmp_path / "linked" / "0", tmp_path / "linked" / "1"], tmp_path / "deeper" / "both")
    inspect_shards.main([str(tmp_path / "deeper" / "both"), "--verify"])
    assert not any(path.is_symlink() for path in (tmp_path / "deeper").rglob("*"))


def test_files_are_divided_evenly_and_each_belongs_to_one_share():
    generator = np.random.default_rng(0)
    sources = [Source(f"{number:03}.txt", int(size)) for number, size in enumerate(generator.integers(1, 1000, 100))]
    groups = [build_options.share_sources(share, sources) for share in build_options.parse_share("all/7")]
    assert sorted(source for group in groups for source in group) == sources
    sizes = [sum(source.bytes for source in group) for group in groups]
    assert max(sizes) - min(sizes) < 50
    assert build_options.share_sources(build_options.WHOLE, sources) == tuple(sources)
    with pytest.raises(UserError, match="--part divides files among 101 jobs, but --input matches 100"):
        build_options.share_sources(build_options.parse_share("0/101")[0], sources)


def test_machines_with_equal_hashes_of_the_files_divide_them_alike():
    """Files of equal size belong to the same share wherever they are mounted, or the hashes differ."""

    def divided(*paths: str) -> tuple[str, list[list[str]]]:
        """The hash, and the files of each share, each by the last character of its path."""
        sources = [Source(path, 100) for path in sorted(paths)]
        groups = [build_options.share_sources(share, sources) for share in build_options.parse_share("all/2")]
        return build_options.digest(sources), [sorted(source.path[-1] for source in group) for group in groups]

    assert divided("/data/x/1", "/data/y/2", "/data/z/3") == divided("/mnt/b/1", "gs://bucket/2", "/mnt/a/3")
    same_names = divided("/data/a/1", "/data/b/1", "/data/c/2")
    assert same_names[0] == divided("/mnt/deep/a/1", "/mnt/deep/b/1", "/mnt/deep/c/2")[0]
    assert same_names[0] != divided("/z/a/1", "/x/b/1", "/y/c/2")[0]
    assert sum(map(len, same_names[1])) == 3 == sum(map(len, divided("/data/x/1", "gs://bucket/1", "text/2")[1]))


def test_finished_parts_are_not_merged_with_other_arguments(text, vocab_dir, tmp_path, building):
    building(1)
    with pytest.raises(UserError, match="the disk is full"):
        build(options(text, vocab_dir, tmp_path / "out", "all/2"))
    for changes, what in (
        ({"weights": (3.0,)}, "sources"),
        ({"unit_mb": 0.02}, "unit_mb 0.01, now 0.02"),
        ({"seed": 4}, "seed"),
    ):
        with pytest.raises(UserError, match=rf"out\.parts was started with other arguments \({what}"):
            build(options(text, vocab_dir, tmp_path / "out", "all/2", **changes))
    assert not (tmp_path / "out").exists()


def test_mistakes_with_all_parts_write_nothing(text, vocab_dir, tmp_path):
    for changes, message in (
        ({"input": tmp_path / "none*"}, "matches no file"),
        ({"tokenizer": tmp_path / "none"}, "none"),
        ({"part": "all/6"}, "--part divides files among 6 jobs"),
    ):
        with pytest.raises(UserError, match=message):
            build(options(text, vocab_dir, tmp_path / "out", **{"part": "all/2", **changes}))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_has_the_name_of_the_parts_is_text_and_is_left_alone(text, vocab_dir, tmp_path):
    shutil.copytree(text, tmp_path / "out.parts")
    with pytest.raises(UserError, match=r"out\.parts already exists and was not left by an interrupted run"):
        build(options(text, vocab_dir, tmp_path / "out", "all/2"))
    assert len(list((tmp_path / "out.parts").iterdir())) == 5
    whole = build(options(tmp_path / "out.parts", vocab_dir, tmp_path / "out"))
    assert len(whole["sources"]) == 5


def test_an_unfinished_output_among_the_input_is_refused(text, vocab_dir, tmp_path):
    shutil.copytree(text, tmp_path / "tree")
    words = tmp_path / "tree" / "old.incomplete" / "tokenizer" / "vocab.txt"
    words.parent.mkdir(parents=True)
    words.write_text("a\nb\n")
    (tmp_path / "tree" / "old.incomplete" / MARKER).touch()
    with pytest.raises(UserError, match=r"vocab\.txt, which belongs to .*old\.incomplete, an output of bert_jax"):
        build(options(text, vocab_dir, tmp_path / "out", input=f"{tmp_path}/tree/**/*.txt"))


def test_a_base_whose_held_out_document_was_moved_agrees_with_its_text_after_a_merge(vocab_dir, tmp_path):
    texts = [f"Document number {number}. It has two sentences." for number in range(12)]
    for name, numbers in (("a", (0, 1, 2, 4, 7, 8)), ("b", (3, 5, 9, 10, 11))):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts[number] for number in numbers) + "\n")
    given = {"objective": "nsp", "seq_len": 32}
    build(options(tmp_path, vocab_dir, tmp_path / "base", input=tmp_path / "a.txt", **given))
    build(options(tmp_path, vocab_dir, tmp_path / "more", "+1", input=tmp_path / "b.txt", **given))
    whole = merge([tmp_path / "base", tmp_path / "more"], tmp_path / "whole")
    assert whole["skipped_reading"] == {} and whole["parts"]["eval"]["documents"] == 2
    inspect_shards.main([str(tmp_path / "whole"), "--verify"])


def test_all_parts_inside_their_input_read_only_the_text(text, vocab_dir, tmp_path):
    shutil.copytree(text, tmp_path / "tree")
    found = {"input": f"{tmp_path}/tree/**/*.txt"}
    whole = build(options(text, vocab_dir, tmp_path / "tree" / "shards", "all/2", **found))
    assert sorted(Path(source["path"]).name for source in whole["sources"]) == [f"file{n}.txt" for n in range(5)]


def test_no_document_is_in_train_and_eval_after_merging(vocab_dir, tmp_path):
    """File a has one document that is chosen for eval, too few for next sentences, and file b has it and another."""
    texts = [f"Document number {number}. It has two sentences." for number in range(12)]
    chosen = {0, 3, 5, 6}  # by their hashes, of eval_fraction 0.2
    for name, numbers in (("a", (0, 1, 2, 4, 7, 8)), ("b", (0, 3, 9, 10, 11))):
        assert len(chosen.intersection(numbers)) == (1 if name == "a" else 2)
        (tmp_path / f"file_{name}.txt").write_text("\n\n".join(texts[number] for number in numbers) + "\n")
    given = {"objective": "nsp", "seq_len": 32, "input": tmp_path / "file_*.txt"}
    whole = build(options(tmp_path, vocab_dir, tmp_path / "whole", "all/2", **given))
    assert whole["skipped_reading"] == {"too_few_for_eval": 1}
    assert (whole["parts"]["train"]["documents"], whole["parts"]["eval"]["documents"]) == (8, 2)
    assert [share["documents"] for share in whole["shares"]] == [5, 5] and whole["counts"]["documents"] == 11
    inspect_shards.main([str(tmp_path / "whole"), "--verify"])


def test_a_damaged_part_is_named_in_one_line(text, vocab_dir, tmp_path):
    for number in range(2):
        build(options(text, vocab_dir, tmp_path / f"part{number}", f"{number}/2"))
    shard = next((tmp_path / "part1" / "train").iterdir())
    content = shard.read_bytes()
    shard.write_bytes(content[:200] + bytes(len(content) - 200))
    with pytest.raises(UserError, match=rf"{shard.name} is damaged .*\. Copy it again"):
        merge([tmp_path / "part0", tmp_path / "part1"], tmp_path / "out")


def test_documents_of_shares_add_up_with_skipped_ones(text, vocab_dir, tmp_path):
    shutil.copytree(text, tmp_path / "text")
    (tmp_path / "text" / "file9.txt").write_text((text / "file0.txt").read_text())
    base = build(options(tmp_path / "text", vocab_dir, tmp_path / "base", dedup=True))
    assert base["skipped_reading"] == {"duplicate": 30}
    build(options(text, vocab_dir, tmp_path / "more", "+1", dedup=True))
    merged = merge([tmp_path / "base", tmp_path / "more"], tmp_path / "out")
    assert [share["documents"] for share in merged["shares"]] == [150, 150]


@pytest.mark.parametrize(
    "given", ["3", "3/3", "1/0", "-1/3", "a/3", "1/b", "all", "0/2049", "+2048", "+x", "/", "1/2/3"]
)
def test_wrong_parts_are_refused(given, text, vocab_dir, tmp_path):
    with pytest.raises(UserError, match="use I/N with I from 0 to N - 1, all/N, or"):
        options(text, vocab_dir, tmp_path / "out", given)


def test_outputs_that_do_not_belong_together_are_refused_in_one_line(text, vocab_dir, tmp_path):
    def made(name: str, part: str, **changes: object) -> Path:
        build(options(text, vocab_dir, tmp_path / name, part, **changes))
        return tmp_path / name

    def refusal(*inputs: Path) -> str:
        with pytest.raises(UserError) as caught:
            merge(inputs, tmp_path / "out")
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
        return str(caught.value)

    first = made("first", "0/2")
    assert "lacks the parts 1/2" in refusal(first)
    assert "differ in seed: 4 and 3" in refusal(first, made("seed", "1/2", seed=4))
    assert "are both share 0. Build one of them with --part +1" in refusal(first, made("again", "0/2"))
    other = made("other", "1/2", input=text / "file[0-3].txt")
    assert "parts of jobs with other files, weights or another number of parts" in refusal(first, other)
    weighted = made("weighted", "1/2", weights=(2.0,))
    assert "parts of jobs with other files, weights or another number of parts" in refusal(first, weighted)
    assert "have units of 10000 and 20000 bytes" in refusal(first, made("units", "1/2", unit_mb=0.02))
    with pytest.raises(UserError, match="matches no output of build_examples"):
        folders(str(text))
    damaged = json.loads((first / "manifest.json").read_text())
    (first / "manifest.json").write_text(json.dumps(damaged | {"format": "tfds"}))
    assert "has tfds shards, but only Arrow shards can be merged" in refusal(first)
    with pytest.raises(UserError, match="--part builds arrow shards"):
        options(text, vocab_dir, tmp_path / "tfds", "0/2", format="tfds")


def test_parts_with_and_without_unspaced_scripts_are_merged(text, tmp_path):
    """Words of English are the same by both rules, so one part states no rule for words and the other one does."""
    english = (text / "file0.txt").read_text()
    tokenizer_kinds.make("bpe", english.split("\n"), tmp_path / "words")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "file0.txt").write_text(english)
    (tmp_path / "text" / "file1.txt").write_text("\n\n".join(unspaced_documents(30)), encoding="utf-8")
    given = {"mask_unit": "word", "masking": "static"}
    for number in range(2):
        build(options(tmp_path / "text", tmp_path / "words", tmp_path / f"part{number}", f"{number}/2", **given))
    parts = [tmp_path / f"part{number}" for number in range(2)]
    assert {read_manifest(part)["masking"].get("words") for part in parts} == {None, "scripts"}
    merged = merge(parts, tmp_path / "merged")
    assert merged["masking"]["words"] == "scripts"
    assert merged["counts"]["words"] == sum(read_manifest(part)["counts"]["words"] for part in parts)
    inspect_shards.main([str(tmp_path / "merged"), "--verify"])
