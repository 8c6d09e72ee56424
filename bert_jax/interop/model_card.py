"""Renders an exported model's README.md: its data, training, scores and limits, and how to load it.

Cards are published, so they name files and folders only by the last part of their paths.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from bert_jax.interop import card_metadata
from bert_jax.interop.family import Family, head_names
from bert_jax.interop.loaded_model import MOVING_AVERAGE, LoadedModel
from bert_jax.model.layers import unflatten
from bert_jax.storage import location
from bert_jax.storage.files import IN_MEMORY
from bert_jax.tokenization.vocabulary import KINDS
from bert_jax.train.metrics import duration
from bert_jax.train.optim import overrides_weight_decay
from bert_jax.train.workdir import CHECKPOINTS

TRANSFORMERS, SENTENCE_TRANSFORMERS = "transformers", "sentence-transformers"  # as the Hub names the libraries

# The Hub's task names by head; the first head that a model has decides.
_PIPELINES = {
    "classes": "text-classification",
    "tags": "token-classification",
    "question": "question-answering",
    "choices": "multiple-choice",
    "mlm": "fill-mask",
    "lm": "text-generation",
}

# The libraries in whose folders a missing pooler matters.
_WITH_POOLER = (TRANSFORMERS, SENTENCE_TRANSFORMERS)

# Keys of result.json that are no scores, with their titles.
_EFFORT = {"step": "steps taken", "tokens": "tokens seen", "seconds": "time of training"}
_RULES = "optimizer.decays"  # regular expressions, shown as code
# Configuration keys that a card shows if they are set.
_PATHS = ("task.train", "init_from", "branch_from", "distill.teacher")
_DATA = ("data.train", "data.mixture", "data.phases")  # only if the run did not record its data
_SETTINGS = (
    "objective",
    "batch_size",
    "batch_schedule",
    "steps",
    "tokens",
    "budget_minutes",
    "epochs",
    "data.mask_rate",
    "data.mask_schedule",
    "data.mask_shape",
    "objective.z_loss",
    "optimizer",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.schedule.warmup_steps",
    "optimizer.schedule.warmup_share",
    "optimizer.weight_decay",
    _RULES,
    "optimizer.ema_decay",
    "compute_dtype",
    "seed",
)

# Values that change nothing are not listed; `steps` is the usual data.mask_shape.
_UNNAMED: tuple[Any, ...] = (None, "", {}, "auto", "none", "steps", 0, 0.0)

# Objectives that ignore the shards' masks, and their own masks.
_OWN_MASKS = {"causal": "none", "diffusion": "random rates"}

_WITH_BERT_JAX = "bert_jax takes the folder as `--checkpoint`, `--config.init_from`, or through `bert-jax convert`."
_WITH_SENTENCE_TRANSFORMERS = (
    "```python\nfrom sentence_transformers import SentenceTransformer\n\n"
    'vectors = SentenceTransformer("PATH").encode(["A sentence.", "Another one."])\n```\n\n' + _WITH_BERT_JAX
)

UNLABELLED = {"question": "a span of the context", "embedding": "a vector of each text"}  # answers by kind of task


class Loading(NamedTuple):
    """How a folder is loaded."""

    library: str  # by the Hub's name
    section: str  # Markdown with a snippet
    pipeline: str = ""  # the Hub's name of its task; empty for that of the model's head
    tags: tuple[str, ...] = ()


def pipeline_tag(loaded: LoadedModel) -> str:
    """The Hub's name of a model's task."""
    names = head_names(loaded.heads)
    return next((name for part, name in _PIPELINES.items() if part in names), "feature-extraction")


def render(loaded: LoadedModel, family: Family, class_name: str, parameters: int, loading: str | Loading) -> str:
    """Renders the model card as Markdown, without sections that would be empty.

    Args:
        loaded: The model.
        family: Its family.
        class_name: Its class in transformers.
        parameters: The number of parameters in the file.
        loading: TRANSFORMERS or SENTENCE_TRANSFORMERS, or another way.
    """
    model = loaded.model
    if loading == TRANSFORMERS:
        section = (
            f"```python\nfrom transformers import AutoTokenizer, {class_name}\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("PATH")\n'
            f'model = {class_name}.from_pretrained("PATH")\n```\n\n' + _tagging_call(loaded) + _WITH_BERT_JAX
        )
        loading = Loading(TRANSFORMERS, section)
    elif loading == SENTENCE_TRANSFORMERS:
        loading = Loading(SENTENCE_TRANSFORMERS, _WITH_SENTENCE_TRANSFORMERS, "sentence-similarity")
    assert isinstance(loading, Loading)
    library, section, pipeline, tags = loading
    counted = "parameters of adapters" if library == "peft" else "parameters"
    pipeline = pipeline or pipeline_tag(loaded)
    kind = "language model (left to right)" if model.causal else "encoder"
    case = "uncased" if loaded.vocabulary.lowercase else "cased"
    average = ""
    if loaded.average == MOVING_AVERAGE:
        average = " The weights are a moving average over the training steps."
    elif loaded.average:
        average = f" The weights are the mean of the last {loaded.average.partition(':')[2]} checkpoints."
    task = []
    if loaded.task is not None:
        unlabelled = UNLABELLED.get(loaded.task["kind"], "a number")
        labels = ", ".join(f"`{label}`" for label in loaded.task["labels"]) or unlabelled
        task = ["## Task", f"{loaded.task['name']} ({loaded.task['kind']}). Answers: {labels}."]
    sections = [
        card_metadata.front_matter(loaded, library, pipeline, [family.model_type, "bert_jax", *tags], class_name),
        f"# {class_name}",
        f"A {family.title} {kind} of {model.layers} layers, width {model.width}, {model.heads} attention heads and "
        f"{parameters:,} {counted}, for up to {model.max_positions} tokens, with an {case} "
        f"{KINDS[loaded.vocabulary.kind]} vocabulary of {loaded.vocabulary.vocab_size:,}. Exported by bert_jax"
        + (f" after {loaded.step:,} steps of training." if loaded.step else ".")
        + average,
        *task,
        *_data_section(loaded),
        *_section("Training", ("setting", "value"), _training_rows(loaded)),
        *_section("Evaluation", ("metric", "value"), list(_scores(loaded.metrics).items())),
        "## How to load it",
        section,
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(loaded, family, class_name if library in _WITH_POOLER else "")),
    ]
    return "\n\n".join(sections) + "\n"


def _tagging_call(loaded: LoadedModel) -> str:
    """Shows how transformers finds the same entities as bert_jax; empty for models without tags."""
    if loaded.heads.tags < 2:
        return ""
    # By default transformers takes pieces as words, and cuts a long text at its maximum in silence.
    strategy = "average" if (loaded.task or {}).get("decode") == "mean" else "first"
    task = {"max_length": loaded.model.max_positions, "doc_stride": 0, **(loaded.task or {})}
    # In transformers, a stride is what windows share.
    room = task["max_length"] - 2
    shared = room - min(task["doc_stride"] or -(-room // 2), room)
    return (
        f"Tags of whole words, for texts of any length, in windows of {task['max_length']} tokens that overlap about "
        "as those of `bert-jax predict`, which end between words:\n\n```python\nfrom transformers import pipeline\n\n"
        f'tagger = pipeline("token-classification", "PATH", aggregation_strategy="{strategy}", stride={shared})\n'
        f"tagger.tokenizer.model_max_length = {task['max_length']}\n"
        'print(tagger("Some text."))\n```\n\n'
    )


def _data_section(loaded: LoadedModel) -> list[str]:
    """Pretraining sources, or the number of fine-tuning examples."""
    if loaded.task is not None:
        counts = loaded.metrics.get("counts", {})
        rows = [(part, count["examples"], count.get("tokens")) for part, count in counts.items()]
        return _section("Data", ("part", "examples", "tokens"), [row for row in rows if row[1] is not None])
    columns = ("source", "share of the rows", "documents", "tokens", "positions in a row", "objective", "masking")
    sources, files = [], []
    for source in loaded.data:
        start = f", from step {source['from_step']:,}" if source["from_step"] else ""
        counts = [source[key] for key in ("documents", "tokens", "seq_len", "objective")]
        masks = _masks(loaded, source["masking"])
        sources.append((f"{source['name']}{start}", f"{source['share']:.1%}", *counts, masks))
        names = ", ".join(f"`{name}`" for name in source["input"])
        more = source["input_files"] - len(source["input"])
        files.append(
            (f"- {source['name']}: " if len(loaded.data) > 1 else "Read from ")
            + names
            + (f" and {more:,} more files." if more else ".")
        )
    return [*_section("Data", columns, sources), "\n".join(files)] if sources else []


def _masks(loaded: LoadedModel, masking: Mapping[str, Any]) -> str:
    """Describes a source's masks; a rate of the run overrides the shards' rate."""
    # `auto` chose the objective by the model, so a causal model had no masks.
    objective = (loaded.training.get("objective") or {}).get("kind", "auto")
    if loaded.model.causal or loaded.model.directions > 1:
        objective = "causal"
    if objective in _OWN_MASKS or not masking["rate"]:
        return _OWN_MASKS.get(objective, "none")
    data = loaded.training.get("data") or {}
    schedule = data.get("mask_schedule")
    rate = f"rates {schedule}" if schedule else f"{data.get('mask_rate') or masking['rate']:.0%}"
    rule = (data.get("masking") or {}).get("kind", "shards")  # of an extension, in training
    return f"{masking['kind']}, {rate}, unit {masking['unit']}" + (f", rule {rule}" if rule != "shards" else "")


def _training_rows(loaded: LoadedModel) -> list[tuple[str, Any]]:
    """The run's most important settings by configuration key, and its effort."""
    paths = _PATHS if loaded.data else (*_PATHS, *_DATA)
    # A weight decay that no parameter uses would mislead.
    rules = (loaded.training.get("optimizer") or {}).get("decays") or {}
    overridden = "optimizer.weight_decay" if overrides_weight_decay(rules, unflatten(loaded.params)) else ""
    rows = []
    for key in (*paths, *_SETTINGS):
        value: Any = loaded.training
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else None
        if key in paths and value:
            value = _without_folders(value)
        # A group of several kinds, such as the optimizer, is named by its kind; its own keys follow.
        if isinstance(value, Mapping) and "kind" in value:
            value = value["kind"]
        if value not in _UNNAMED and key != overridden:
            rows.append((key, f"`{value}`" if key == _RULES else value))
    rows += _software(loaded)
    for name, title in _EFFORT.items():
        if value := loaded.metrics.get(name):
            rows.append((title, duration(value) if name == "seconds" else f"{value:,}"))
    return rows


def _software(loaded: LoadedModel) -> list[tuple[str, Any]]:
    """The recipe, date, devices and versions of the last start; not its host and command, since cards are public."""
    if not loaded.starts:
        return []
    start = loaded.starts[-1]
    versions = [f"{name} {start['versions'][name]}" for name in ("bert_jax", "jax") if name in start["versions"]]
    commit = f"commit {start['commit'][:12]}" if start["commit"] else ""
    recipe = _without_folders(start["configuration"]["recipe"])
    return [
        *([("recipe", recipe)] if recipe else []),
        ("trained", f"{start['time'][:10]}, {start['devices']}"),
        ("versions", ", ".join(filter(None, [*versions, commit]))),
    ]


def _without_folders(value: Any) -> Any:
    """Replaces paths in a configuration's value by names: {wiki: (/home/me/wiki, 1)} becomes {wiki: (wiki, 1)}."""
    if isinstance(value, Mapping):
        return {key: _without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(entry) for entry in value]
    if not isinstance(value, str) or value.startswith(location.PREFIX):
        return value
    parts = PurePath(value).parts
    # Data from memory were in a temporary folder, whose name means nothing.
    if any(part.startswith(IN_MEMORY) for part in parts):
        return ""
    # The empty names let short paths unpack, too.
    *_, run, folder, last = ("", "", "", *parts)
    return f"{run}, step {last}" if run and folder == CHECKPOINTS else last


def _scores(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The scores in result.json by name: numbers, or means ± standard deviations over seeds."""
    shown = {}
    for name, (value, deviation, seeds) in card_metadata.scores(metrics).items():
        spread = f" ± {_number(deviation)}" if deviation is not None else ""
        shown[name] = _number(value) + spread + (f" ({seeds} seeds)" if seeds > 1 else "")
    return shown


_READINGS = {
    "middle": "their beginnings and ends",
    "windows": "windows, of whose answers the mean counts",
    "windows_max": "windows, of whose answers the maximum counts",
}


def _limits(loaded: LoadedModel, family: Family, class_name: str) -> list[str]:
    """The model's limits that its run shows."""
    # Fine-tuned models have no recorded rows; nothing is then said about their length.
    longest = max((source["seq_len"] for source in loaded.data), default=loaded.model.max_positions)
    lacks_pooler = "pooler" in family.optional and not loaded.heads.pooler
    truncation, task_length = (loaded.task or {}).get("truncation", "right"), (loaded.task or {}).get("max_length")
    limits = (
        (
            lacks_pooler and class_name == family.base_class,
            "It has no trained pooler: `pooler_output` of transformers is the tanh of the last hidden state of the "
            "first token.",
        ),
        (
            lacks_pooler and class_name not in ("", family.base_class),
            'It has no pooler. For hidden states alone, use `AutoModel.from_pretrained("PATH", '
            "add_pooling_layer=False)`; without this, `pooler_output` is random, as a warning of transformers says.",
        ),
        (
            truncation not in ("right", "left"),
            f"It was trained to read texts over {task_length} tokens by {_READINGS.get(truncation, truncation)}, as "
            "`bert-jax predict` does. Other programs cut their ends.",
        ),
        (
            longest < loaded.model.max_positions,
            f"It was trained on rows of up to {longest} tokens. It accepts {loaded.model.max_positions}, but was not "
            "measured on longer texts.",
        ),
        (loaded.vocabulary.lowercase, "It does not distinguish capital letters."),
        (
            any(source["held_out_documents"] for source in loaded.data),
            "Held-out documents come from the sources that it was trained on. Other text is harder to predict.",
        ),
        (loaded.metrics, "It was not evaluated beyond the figures above."),
        (not loaded.metrics, "No evaluation of it is known."),
        (True, "It reproduces its training text, including mistakes and bias."),
    )
    return [limit for applies, limit in limits if applies]


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A heading and a table; nothing without rows."""
    if not rows:
        return []
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return [f"## {title}", "\n".join("| " + " | ".join(line) + " |" for line in lines)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", r"\|")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
