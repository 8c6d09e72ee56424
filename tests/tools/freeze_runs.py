"""The items of all groups except commands, for freeze.py: what a checkout's commands write."""

import collections
import gzip
import json
import lzma
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from freeze_sandbox import Sandbox, arrays, hashes, options, read_json, read_lines, sha256, without_volatile, workdir

Item = tuple[str, Callable[[], Any]]

BOOKS = ("irving_rip_van_winkle", "dickens_a_christmas_carol")
PARAGRAPHS = 3  # of a document
DOCUMENTS = 60

TOKENIZERS = {
    "wordpiece": "--kind=wordpiece --vocab_size=500 --lowercase",
    "cased": "--vocab_size=600",
    "bpe": "--kind=bpe --vocab_size=500",
    "unigram": "--kind=unigram --vocab_size=400",
    "sentencepiece_bpe": "--kind=sentencepiece_bpe --vocab_size=400 --lowercase",
}

# The tokenizer, and the flags of build_examples in addition to input, output and tokenizer.
SHARDS = {
    "nsp": ("wordpiece", "--seq_len=32 --mask_unit=word --dupe_factor=2 --workers=2"),
    "packed": ("cased", "--seq_len=64 --objective=nsp --pack=4"),
    "static": ("wordpiece", "--seq_len=32 --masking=static --mask_rate=0.2 --seed=7"),
    "ngram": ("wordpiece", "--seq_len=48 --objective=sop --masking=static --mask_unit=ngram --workers=1"),
    "bpe": ("bpe", "--seq_len=32 --objective=full_sentences --random_tokens=unigram"),
    "sentences": ("unigram", "--seq_len=32 --objective=doc_sentences --pack=3 --mask_unit=word"),
    "span": ("cased", "--seq_len=32 --objective=single --mask_unit=span"),
    "span_static": ("cased", "--seq_len=32 --objective=single --mask_unit=span --masking=static --dupe_factor=2"),
    "reordered": ("sentencepiece_bpe", "--seq_len=32 --objective=single --masking=static --reorder_rate=0.1"),
    "corrupted": ("wordpiece", "--seq_len=32 --delete_rate=0.05 --insert_rate=0.05 --short_seq_prob=0.5"),
    "cached": ("wordpiece", "--seq_len=32 --mask_unit=word --dupe_factor=2 --token_cache=shards/cache"),
}
MIXED = "--seq_len=32 --weights=1,0.5 --dedup --on_error=skip --objective=full_sentences --eval_fraction=0"


def write_text(sandbox: Sandbox) -> dict[str, str]:
    """Writes the small corpora from the sample text of the checkout; returns their hashes."""
    paragraphs: list[str] = []
    for book in BOOKS:
        packed = (sandbox.checkout / "data_prep" / "sample" / "books" / f"{book}.txt.xz").read_bytes()
        paragraphs += [line for line in lzma.decompress(packed).decode("utf-8").split("\n") if line]
    starts = range(0, DOCUMENTS * PARAGRAPHS, PARAGRAPHS)
    documents = ["\n".join(paragraphs[start : start + PARAGRAPHS]) for start in starts]
    folder = sandbox.work / "shards"
    plain = ("\n\n".join(documents) + "\n").encode("utf-8")
    # The same document twice, for --dedup, and a line that is not JSON, for --on_error.
    lines = [json.dumps({"text": one}) for one in (*documents[:20], documents[3])]
    (folder / "text.txt").write_bytes(plain)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, "{"]).encode("utf-8"), mtime=0))
    return {"text.txt": sha256(plain), "more.jsonl": sha256("\n".join(lines).encode("utf-8"))}


def shards(sandbox: Sandbox) -> Iterator[Item]:
    work = sandbox.work

    def tokenizer(name: str, flags: str) -> Any:
        output = f"shards/tokenizer_{name}"
        sandbox.run("train-tokenizer", "--input=shards/text.txt", f"--output={output}", *flags.split())
        return hashes(work / output)

    def build(name: str, words: str, flags: str, text: str = "shards/text.txt") -> Any:
        output = f"shards/{name}"
        files = (f"--input={text}", f"--tokenizer=shards/tokenizer_{words}", f"--output={output}", "--unit_mb=0.05")
        held_out = () if "eval_fraction" in flags else ("--eval_fraction=0.2",)
        sandbox.run("build-examples", *files, *held_out, *flags.split())
        return hashes(work / output)

    def copied() -> Any:
        sandbox.run("copy-examples", "--input=shards/nsp", "--output=shards/copied")
        return hashes(work / "shards" / "copied")

    yield "text", lambda: write_text(sandbox)
    for name, flags in TOKENIZERS.items():
        yield f"tokenizer_{name}", lambda name=name, flags=flags: tokenizer(name, flags)
    for name, (words, flags) in SHARDS.items():
        yield name, lambda name=name, words=words, flags=flags: build(name, words, flags)
    yield "mixed", lambda: build("mixed", "bpe", MIXED, "shards/text.txt,shards/more.jsonl.gz")
    yield "copied", copied
    yield (
        "inspected",
        lambda: [
            sandbox.attempt("inspect-shards", f"shards/{name}", "--verify").returncode
            for name in ("nsp", "ngram", "sentences", "mixed")
        ],
    )


# LLVM's optimizations are left out of short runs: compiling takes most of their time.
FAST = "--xla_backend_optimization_level=0"
EIGHT = f"{FAST} --xla_force_host_platform_device_count=8"

TINY = "model.layers=2 model.width=32 model.heads=4 model.feed_forward=48 model.max_positions=64"
RUN = "compute_dtype=float32 batch_size=8 steps=4 log_every=1 checkpoint.every_steps=2 eval.every_steps=2"
MUON = "optimizer=muon optimizer.schedule=wsd optimizer.ema_decay=0.9 optimizer.decays={'encoder/layers/0/':0.1}"

RAMP = "microbatches=2 batch_schedule={0:4,2:8} data.mask_schedule={0:0.3,2:0.1}"

# The recipe, the shards, XLA_FLAGS and the keys that each pretraining run sets in addition to TINY and RUN.
PRETRAINING = {
    "nsp": ("bert_tiny.py", "nsp", FAST, ""),
    "packed": ("bert_tiny.py", "packed", FAST, "model.layer_loop=scan model.remat=layer"),
    "gpt": ("gpt.py:gpt2", "bpe", FAST, "model.dropout=0.1 optimizer.learning_rate=1e-3"),
    "modernbert": ("modernbert.py:base", "sentences", FAST, "model.layers=4 model.window=8 optimizer.weight_decay=0.1"),
    "span_boundary": ("spanbert.py:base", "span", FAST, "model.norm=pre"),
    "roberta": ("roberta.py", "bpe", FAST, ""),
    "static": ("bert_tiny.py", "static", FAST, "on_nonfinite=skip"),
    "relative": ("relative.py:buckets", "span", FAST, "optimizer.layer_decay=0.9"),
    "lamb": ("bert_large.py:lamb", "nsp", FAST, "optimizer.learning_rate=1e-3"),
    "muon": ("bert_tiny.py", "nsp", FAST, MUON),
    "microbatches": ("bert_tiny.py", "nsp", FAST, RAMP),
    "phases": ("bert_tiny.py", "nsp", FAST, "data.phases={2:'shards/packed_wordpiece'} seed=3"),
    "mesh": ("bert_tiny.py", "nsp", EIGHT, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"),
}

FINETUNING = "compute_dtype=float32 batch_size=8 log_every=1 epochs=1 task.max_length=32 optimizer.learning_rate=1e-3"
OWN = "task.train=finetuning/{0}_train.{1} task.dev=finetuning/{0}_dev.{1} task.test=finetuning/{0}_test.{1}"
CHOICE = "task.text=context task.choices=one,two,three task.label=right"

# The recipe, the form of the files, the kind of data and the keys of each fine-tuning run.
TASKS = {
    "classification": ("own.py", "text", "tsv", "task.text=text task.label=label seeds=2"),
    "regression": ("own.py", "score", "tsv", "task.text=text task.label=label task=regression"),
    "tagging": ("tagging.py:task=own", "tags", "conll", "task.crf=True seeds=2"),
    "question": ("own.py", "question", "jsonl", "task=question task.doc_stride=8 task.max_query_length=8"),
    "choice": ("choice.py:task=own", "choice", "csv", f"{CHOICE} train_layers=last:1"),
    "spans": ("spans.py:kind=span_pairs", "spans", "jsonl", "early_stop=1"),
}
WORDS = (
    "the",
    "sun",
    "was",
    "going",
    "down",
    "over",
    "mountain",
    "Rip",
    "Van",
    "Winkle",
    "Scrooge",
    "a",
    "ghost",
    "of",
)
LENGTHS = ("short", "long")


def training(sandbox: Sandbox) -> Iterator[Item]:
    def pretrain(name: str, recipe: str, shards: str, xla: str, keys: str) -> Any:
        files = (sandbox.recipe(recipe), f"--workdir=training/{name}", f"--config.data.train=shards/{shards}")
        sandbox.run("pretrain", *files, *overrides(f"{TINY} {RUN} {keys}"), XLA_FLAGS=xla)
        return workdir(sandbox.work / "training" / name)

    def resume() -> Any:
        """The run nsp, from its checkpoint of step 2: as if it had been killed after that."""
        folder = sandbox.work / "training" / "resumed"
        shutil.copytree(sandbox.work / "training" / "nsp", folder)
        shutil.rmtree(folder / "checkpoints" / "4")
        (folder / "result.json").unlink()
        return pretrain("resumed", *PRETRAINING["nsp"])

    def evaluate(name: str, shards: str, xla: str, *flags: str) -> Any:
        files = (f"--checkpoint=training/{name}", f"--data=shards/{shards}")
        return last_json(sandbox.run("evaluate", *files, *flags, XLA_FLAGS=xla))

    # The second length of the run phases, with the tokenizer of the first.
    yield "shards_of_two_lengths", lambda: _second_length(sandbox)
    for name, values in PRETRAINING.items():
        yield name, lambda name=name, values=values: pretrain(name, *values)
    yield "resumed", resume
    for name in ("nsp", "packed", "gpt", "modernbert", "span_boundary"):
        shards = PRETRAINING[name][1]
        yield f"evaluated_{name}", lambda name=name, shards=shards: evaluate(name, shards, FAST)
    yield "evaluated_mesh", lambda: evaluate("mesh", "nsp", EIGHT, "--mesh.fsdp=2", "--mesh.tensor=2")
    yield "evaluated_average", lambda: evaluate("muon", "nsp", FAST, "--average=ema")


def _second_length(sandbox: Sandbox) -> Any:
    flags = "--input=shards/text.txt --tokenizer=shards/tokenizer_wordpiece --output=shards/packed_wordpiece"
    shutil.rmtree(sandbox.work / "shards" / "packed_wordpiece", ignore_errors=True)
    sandbox.run("build-examples", *flags.split(), "--seq_len=64", "--pack=2", "--eval_fraction=0.2")
    return hashes(sandbox.work / "shards" / "packed_wordpiece")


def finetuning(sandbox: Sandbox) -> Iterator[Item]:
    work = sandbox.work

    def finetune(name: str, recipe: str, data: str, ending: str, keys: str) -> Any:
        files = (sandbox.recipe(recipe), f"--workdir=finetuning/{name}", "--config.init_from=training/nsp")
        own = OWN.format(data, ending)
        sandbox.run("finetune", *files, *overrides(f"{FINETUNING} {own} {keys}"), XLA_FLAGS=FAST)
        return workdir(work / "finetuning" / name)

    def evaluate(name: str, data: str, ending: str) -> Any:
        files = (f"--checkpoint=finetuning/{name}", f"--data=finetuning/{data}_test.{ending}")
        return last_json(sandbox.run("evaluate", *files, XLA_FLAGS=FAST))

    def predict(name: str, data: str, ending: str, *flags: str) -> Any:
        output = f"finetuning/{name}_predictions.jsonl"
        files = (f"--checkpoint=finetuning/{name}", f"--input=finetuning/{data}_test.{ending}", f"--output={output}")
        sandbox.run("predict", *files, "--form=task", *flags, XLA_FLAGS=FAST)
        return read_lines(work / output)

    write_tasks(work / "finetuning")
    for name, (recipe, data, ending, keys) in TASKS.items():
        values = (name, recipe, data, ending, keys)
        yield name, lambda values=values: finetune(*values)
    for name, (_, data, ending, _) in TASKS.items():
        scores = ("--all_scores",) if name in ("classification", "question", "choice") else ()
        yield f"evaluated_{name}", lambda name=name, data=data, ending=ending: evaluate(name, data, ending)
        yield f"predicted_{name}", lambda values=(name, data, ending, *scores): predict(*values)


def inference(sandbox: Sandbox) -> Iterator[Item]:
    work = sandbox.work
    (work / "inference" / "texts.txt").write_text("The sun was going down.\nRip Van Winkle\ta ghost\n\nof\n", "utf-8")

    def embed(name: str, *flags: str) -> Any:
        output = f"inference/{name}.npz"
        files = ("--checkpoint=training/nsp", "--input=inference/texts.txt", f"--output={output}")
        sandbox.run("embed", *files, *flags, XLA_FLAGS=FAST)
        return arrays(work / output)

    def features() -> Any:
        files = ("--checkpoint=training/nsp", sandbox.recipe("tagging.py:task=own"), "--output=inference/features.json")
        keys = overrides(f"task.max_length=32 {OWN.format('tags', 'conll')}")
        flags = ("--layers=last,1", "--hidden=8", "--batch_size=8", "--epochs=2", "--seeds=1")
        sandbox.run("features", *files, *keys, *flags, XLA_FLAGS=FAST)
        return read_json(work / "inference" / "features.json")

    def fill_mask() -> Any:
        """The tokens and their probabilities; the text around them may change."""
        sentences = ("The [MASK] was going down.", "Rip [MASK] Winkle and a [MASK].")
        shown = sandbox.run("fill-mask", "--checkpoint=training/nsp", *sentences, XLA_FLAGS=FAST)
        return re.findall(r"(\S+)\s+(\d+\.\d+)%", shown)

    def export(checkpoint: str, form: str, *flags: str) -> Any:
        output = f"inference/{checkpoint.replace('/', '_')}_{form}{len(flags)}"
        files = (f"--checkpoint={checkpoint}", f"--format={form}", f"--output={output}")
        sandbox.run("export", *files, *flags, XLA_FLAGS=FAST)
        return exported(work / output)

    def convert(source: str) -> Any:
        output = f"inference/{source}_converted"
        sandbox.run("convert", f"--input=inference/{source}", f"--output={output}", XLA_FLAGS=FAST)
        return workdir(work / output)

    yield "embed_mean", lambda: embed("mean")
    yield "embed_none", lambda: embed("none", "--pool=none", "--layers=sum_all")
    yield "embed_words", lambda: embed("words", "--pool=words", "--layers=1", "--batch_size=2")
    yield "features", features
    yield "fill_mask", fill_mask
    for name in ("nsp", "gpt", "modernbert", "roberta"):
        yield f"export_hf_{name}", lambda name=name: export(f"training/{name}", "hf")
        yield f"convert_{name}", lambda name=name: convert(f"training_{name}_hf0")
    for name in ("classification", "regression", "question", "choice"):
        yield f"export_hf_{name}", lambda name=name: export(f"finetuning/{name}", "hf")
    yield "export_average", lambda: export("training/muon", "hf", "--average=ema")
    yield "export_orbax", lambda: export("training/nsp", "orbax")
    yield "export_stablehlo", lambda: export("training/nsp", "stablehlo")
    yield "export_stablehlo_tagging", lambda: export("finetuning/tagging", "stablehlo")


def exported(folder: Path) -> dict[str, Any]:
    """The files of an export: tensors, JSON values, the text of programs without locations, hashes of the others."""
    if (folder / "checkpoints").exists():
        return workdir(folder)
    found: dict[str, Any] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found[name] = arrays(file)
        elif file.suffix == ".stablehlo":
            from jax import export

            found[name] = _program(export.deserialize(bytearray(file.read_bytes())).mlir_module())
        elif file.suffix == ".json":
            found[name] = without_volatile(json.loads(file.read_text(encoding="utf-8")))
        elif file.name != "README.md":  # prose
            found |= {f"{name}/{key}": value for key, value in hashes(file.parent).items() if key == file.name}
    return found


LOCATION = re.compile(r" loc\((?:#loc\d*|unknown|\"[^\"]*\"(?:\([^()]*\))?)\)|^#loc.*\n", flags=re.MULTILINE)


def _program(module: str) -> list[str]:
    """The lines of a program without locations; its functions, named after Python's, are numbered in their order."""
    numbers: dict[str, str] = {}
    plain = LOCATION.sub("", module)
    return re.sub(r"@[\w.]+", lambda match: numbers.setdefault(match[0], f"@f{len(numbers)}"), plain).splitlines()


def overrides(keys: str) -> list[str]:
    return options(dict(key.split("=", 1) for key in keys.split()))


def last_json(output: str) -> Any:
    return without_volatile(json.loads(output.strip().splitlines()[-1]))


def write_tasks(folder: Path) -> None:
    """Writes train, dev and test files of every form, 24 and 8 examples of random words each."""
    draw = random.Random(0)
    for part, count in (("train", 24), ("dev", 8), ("test", 8)):
        sentences = [draw.choices(WORDS, k=draw.randint(3, 12)) for _ in range(count)]
        texts = {
            "text.tsv": ["text\tlabel", *(f"{' '.join(one)}\t{LENGTHS[len(one) > 7]}" for one in sentences)],
            "score.tsv": ["text\tlabel", *(f"{' '.join(one)}\t{len(one) / 4}" for one in sentences)],
            "tags.conll": [line for one in sentences for line in (*_tags(one), "")],
            "question.jsonl": [json.dumps(_question(draw, one, number)) for number, one in enumerate(sentences)],
            "choice.csv": ["context,one,two,three,right", *(_choice(draw, one) for one in sentences)],
            "spans.jsonl": [json.dumps(_spans(one)) for one in sentences],
        }
        for name, lines in texts.items():
            stem, ending = name.split(".")
            (folder / f"{stem}_{part}.{ending}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tags(words: list[str]) -> list[str]:
    """Runs of capitalized words are names."""
    tags = ["O"]
    for word in words:
        tags.append(("I-NAME" if tags[-1] != "O" else "B-NAME") if word[0].isupper() else "O")
    return [f"{word} {tag}" for word, tag in zip(words, tags[1:], strict=True)]


def _question(draw: random.Random, words: list[str], number: int) -> dict[str, Any]:
    context = " ".join(words * 4)
    answers = [draw.choice(words)] if number % 4 else []
    return {"id": str(number), "question": "Which word is it?", "context": context, "answers": answers}


def _choice(draw: random.Random, words: list[str]) -> str:
    return ",".join([" ".join(words), *(" ".join(draw.choices(WORDS, k=3)) for _ in range(3)), str(draw.randrange(3))])


def _spans(words: list[str]) -> dict[str, Any]:
    """The first word, and the first two as another type; the second span belongs to the first."""
    spans = [{"start": 0, "end": 1, "label": "WORD"}, {"start": 0, "end": 2, "label": "PAIR"}]
    return {"tokens": words, "spans": spans, "relations": [{"head": 1, "tail": 0, "label": "holds"}]}


TOLERANCE = 0.005  # of a plan's cycles, seconds and bytes; its FLOPs are equal
RECIPES = ("bert_tiny", "bert_base")
DOT = r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[[\d,]*\]\S* )?(%[\w.\-]+),.*lhs_contracting_dims=\{([\d,]*)\}"
STEP = {"steps": 1, "batch_size": 4, "compute_dtype": "float32"}


def compiled_steps(sandbox: Sandbox) -> Iterator[Item]:
    for recipe in RECIPES:
        yield recipe, lambda recipe=recipe: _compiled_step(sandbox, recipe)


def _compiled_step(sandbox: Sandbox, recipe: str) -> Any:
    """The train step of a run of one step: of the programs that the run compiles it has the most matmuls."""
    dump, run = sandbox.work / "hlo" / f"{recipe}_dump", sandbox.work / "hlo" / recipe
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    files = (sandbox.recipe(f"{recipe}.py"), f"--workdir={run}", "--config.data.train=shards/nsp")
    # A program that comes from the cache is not compiled, and so not written.
    fresh = {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_COMPILATION_CACHE_DIR": str(dump / "cache")}
    sandbox.run("pretrain", *files, *options(STEP), XLA_FLAGS=flags, **fresh)
    shutil.rmtree(run)  # a checkpoint of BERT-Base is a gigabyte
    programs = [file.read_text(encoding="utf-8") for file in dump.glob("*.cpu_after_optimizations.txt")]
    text = max(programs, key=lambda program: program.count(" dot("))
    shutil.rmtree(dump)
    normalized = normalize(text)
    kept = sandbox.work / "hlo" / f"{recipe}.txt.gz"
    kept.write_bytes(gzip.compress(normalized.encode("utf-8"), mtime=0))
    return {"text": sha256(normalized.encode("utf-8")), "opcodes": opcodes(text), "matmul FLOPs": matmul_flops(text)}


def normalize(text: str) -> str:
    """HLO without names, source locations and the tables of files and functions: what is left is the program itself."""
    text = re.sub(r", metadata=\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", "", text)
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=\n\n)", "", text, flags=re.DOTALL)
    text = re.sub(r"^HloModule \S+", "HloModule", text)
    numbers: dict[str, str] = {}
    text = re.sub(r"%[\w.\-]+", lambda match: numbers.setdefault(match[0], f"%{len(numbers)}"), text)
    # Parameters of a computation's signature are named without a percent sign.
    return re.sub(r"([(,] ?)[\w.\-]+: ", r"\1", text)


def opcodes(text: str) -> dict[str, int]:
    """How many instructions there are by opcode."""
    found = re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = .*? ([a-z][\w\-]*)\(", text, flags=re.MULTILINE)
    return dict(sorted(collections.Counter(found).items()))


def matmul_flops(text: str) -> int:
    """Twice the multiply-adds of every dot, those of loop bodies once."""
    shapes = dict(re.findall(r"(%[\w.\-]+) = \w+\[([\d,]*)\]", text))
    dots = re.findall(DOT, text)
    total = 0
    for result, left, contracted in dots:
        sizes = _sizes(shapes[left])
        total += 2 * math.prod(_sizes(result)) * math.prod(sizes[axis] for axis in _sizes(contracted))
    return total


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def explain(old: Any, new: Any) -> list[str]:
    """Describes how two compiled steps differ, by opcode, or reports that the counts of opcodes are equal."""
    if "opcodes" not in old or "opcodes" not in new:
        return [f"{old} -> {new}"[:400]]
    names = sorted({*old["opcodes"], *new["opcodes"]})
    counts = [(name, old["opcodes"].get(name, 0), new["opcodes"].get(name, 0)) for name in names]
    found = [f"{name}: {before} -> {after}" for name, before, after in counts if before != after]
    flops = f"matmul FLOPs: {old['matmul FLOPs']} -> {new['matmul FLOPs']}"
    return ["the text differs", flops, *(found or ["the opcodes are the same"])]


def plans(sandbox: Sandbox) -> Iterator[Item]:
    for recipe in RECIPES:
        yield recipe, lambda recipe=recipe: _plan(sandbox, recipe)


def _plan(sandbox: Sandbox, recipe: str) -> Any:
    """A plan without its prose. Integers of FLOPs are written as text, to which no tolerance applies."""
    file = Path("tpu") / f"{recipe}.json"
    arguments = (sandbox.recipe(f"{recipe}.py"), "--topology=v5e:4x4", "--seq_len=128", f"--json={file}")
    tpu = {"path": sandbox.libtpu, "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    sandbox.run("plan", *arguments, **tpu)
    plan = json.loads((sandbox.work / file).read_text(encoding="utf-8"))
    plan["flops"] = {name: str(value) for name, value in plan["flops"].items()}
    return {name: value for name, value in plan.items() if name != "notes"}
