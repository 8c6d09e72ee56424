"""The items of the groups training, finetuning and inference, for freeze.py."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from freeze_sandbox import Sandbox, arrays, hashes, options, read_json, read_lines, without_volatile, workdir

Item = tuple[str, Callable[[], Any]]

# LLVM's optimizations are left out of short runs: compiling takes most of their time.
FAST = "--xla_backend_optimization_level=0"
EIGHT = f"{FAST} --xla_force_host_platform_device_count=8"

TINY = "model.layers=2 model.width=32 model.heads=4 model.feed_forward=48 model.max_positions=64"
RUN = "compute_dtype=float32 batch_size=8 steps=4 log_every=1 checkpoint.every_steps=2 eval.every_steps=2"
MUON = "optimizer=muon optimizer.schedule=wsd optimizer.ema_decay=0.9 optimizer.decays={'encoder/layers/0/':0.1}"

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
    "microbatches": (
        "bert_tiny.py",
        "nsp",
        FAST,
        "microbatches=2 batch_schedule={0:4,2:8} data.mask_schedule={0:0.3,2:0.1}",
    ),
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
            "text.tsv": [
                "text\tlabel",
                *(f"{' '.join(one)}\t{'long' if len(one) > 7 else 'short'}" for one in sentences),
            ],
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
