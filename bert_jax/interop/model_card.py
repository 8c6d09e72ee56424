"""Renders an exported model's README.md: its data, training, scores and limits, and how to load it.

Cards are published, so they name files and folders only by the last part of their paths.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from bert_jax.interop.family import Family, head_names
from bert_jax.interop.loaded_model import MOVING_AVERAGE, LoadedModel
from bert_jax.model.layers import unflatten
from bert_jax.storage import location
from bert_jax.storage.files import IN_MEMORY
from bert_jax.tokenization.vocabulary import KINDS
from bert_jax.train.evaluation import is_threshold
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


def render(loaded: LoadedModel, family: Family, class_name: str, parameters: int, loading: str) -> str:
    """Renders the model card as Markdown, without sections that would be empty.

    Args:
        loaded: The model.
        family: Its family.
        class_name: Its class in transformers.
        parameters: The number of parameters in the file.
        loading: The library that loads it, TRANSFORMERS or SENTENCE_TRANSFORMERS, or a section on another way.
    """
    model = loaded.model
    names = head_names(loaded.heads)
    library = TRANSFORMERS
    pipeline = next((name for part, name in _PIPELINES.items() if part in names), "feature-extraction")
    if loading == TRANSFORMERS:
        loading = (
            f"```python\nfrom transformers import AutoTokenizer, {class_name}\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("PATH")\n'
            f'model = {class_name}.from_pretrained("PATH")\n```\n\n' + _tagging_call(loaded) + _WITH_BERT_JAX
        )
    elif loading == SENTENCE_TRANSFORMERS:
        library, pipeline, loading = SENTENCE_TRANSFORMERS, "sentence-similarity", _WITH_SENTENCE_TRANSFORMERS
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
        f"---\nlibrary_name: {library}\npipeline_tag: {pipeline}\ntags:\n- {family.model_type}\n- bert_jax\n---",
        f"# {class_name}",
        f"A {family.title} {kind} of {model.layers} layers, width {model.width}, {model.heads} attention heads and "
        f"{parameters:,} parameters, for up to {model.max_positions} tokens, with an {case} "
        f"{KINDS[loaded.vocabulary.kind]} vocabulary of {loaded.vocabulary.vocab_size:,}. Exported by bert_jax"
        + (f" after {loaded.step:,} steps of training." if loaded.step else ".")
        + average,
        *task,
        *_data_section(loaded),
        *_section("Training", ("setting", "value"), _training_rows(loaded)),
        *_section("Evaluation", ("metric", "value"), list(_scores(loaded.metrics).items())),
        "## How to load it",
        loading,
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(loaded)),
    ]
    return "\n\n".join(sections) + "\n"


def _tagging_call(loaded: LoadedModel) -> str:
    """The call of transformers that finds the entities that bert_jax finds; empty for models without tags."""
    if loaded.heads.tags < 2:
        return ""
    # By default transformers takes pieces as words, and cuts a long text at its maximum in silence.
    strategy = "average" if (loaded.task or {}).get("decode") == "mean" else "first"
    stride = loaded.model.max_positions // 4
    return (
        "Tags of whole words, for texts of any length:\n\n```python\nfrom transformers import pipeline\n\n"
        f'tagger = pipeline("token-classification", "PATH", aggregation_strategy="{strategy}", stride={stride})\n'
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
    return f"{masking['kind']}, {rate}, unit {masking['unit']}"


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
    for name, title in _EFFORT.items():
        if value := loaded.metrics.get(name):
            rows.append((title, duration(value) if name == "seconds" else f"{value:,}"))
    return rows


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
    *_, run, folder, last = ("", "", "", *parts)
    return f"{run}, step {last}" if run and folder == CHECKPOINTS else last


def _scores(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The scores in result.json by name: numbers, or means ± standard deviations over seeds."""
    scores: dict[str, str] = {}
    for name, value in metrics.items():
        if name in (*_EFFORT, "steps", "counts", "start", "best"):
            continue
        if not isinstance(value, Mapping):
            if isinstance(value, int | float) and not isinstance(value, bool):
                scores[name] = _number(value)
        # A group of metrics, such as `metrics` of a fine-tuning run.
        elif "mean" not in value:
            scores |= _scores(value)
        elif value["mean"] is not None and not is_threshold(name):  # a metric of a task
            spread = f" ± {_number(value['std'])}" if value.get("std") is not None else ""
            seeds = len(value.get("values", ()))
            scores[name] = _number(value["mean"]) + spread + (f" ({seeds} seeds)" if seeds > 1 else "")
    return scores


_READINGS = {
    "middle": "their beginnings and ends",
    "windows": "windows, of whose answers the mean counts",
    "windows_max": "windows, of whose answers the maximum counts",
}


def _limits(loaded: LoadedModel) -> list[str]:
    """The model's limits that its run shows."""
    # Fine-tuned models have no recorded rows; nothing is then said about their length.
    longest = max((source["seq_len"] for source in loaded.data), default=loaded.model.max_positions)
    truncation, task_length = (loaded.task or {}).get("truncation", "right"), (loaded.task or {}).get("max_length")
    limits = (
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
