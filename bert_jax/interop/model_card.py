"""Renders the README.md of an exported model: what it is, how it was trained and evaluated, how to load it."""

from collections.abc import Mapping
from typing import Any

from bert_jax.interop.checkpoint_average import MOVING_AVERAGE
from bert_jax.interop.family import Family, parts_of
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.vocabulary import KINDS

# The Hub's task names by head; the first head that a model has decides.
_PIPELINES = {
    "classes": "text-classification",
    "tags": "token-classification",
    "question": "question-answering",
    "choices": "multiple-choice",
    "mlm": "fill-mask",
    "lm": "text-generation",
}

UNLABELLED = {"question": "a span of the context", "embedding": "a vector of each text"}  # answers by kind


def render(loaded: LoadedModel, family: Family, architecture: str, parameters: int, loading: str = "") -> str:
    """Returns the model card as Markdown. Sections without known content are left out.

    loading    the section on how to load the model; empty for that of transformers
    """
    model = loaded.model
    has = parts_of(loaded.heads)
    pipeline = next((name for part, name in _PIPELINES.items() if part in has), "feature-extraction")
    kind = "language model (left to right)" if model.causal else "encoder"
    case = "uncased" if loaded.vocabulary.lowercase else "cased"
    sections = [
        f"---\nlibrary_name: transformers\npipeline_tag: {pipeline}\ntags:\n- {family.model_type}\n- bert_jax\n---",
        f"# {architecture}",
        f"A {family.title} {kind} of {model.layers} layers, width {model.width}, {model.heads} attention heads and "
        f"{parameters:,} parameters, for up to {model.max_positions} tokens, with an {case} "
        f"{KINDS[loaded.vocabulary.kind]} vocabulary of {loaded.vocabulary.vocab_size:,}. Exported by bert_jax"
        + (f" after {loaded.step:,} steps of training." if loaded.step else ".")
        + _average_sentence(loaded.average),
        *_task_section(loaded),
        *_table_section("Training", _training_rows(loaded.training)),
        *_table_section("Evaluation", _metric_rows(loaded.metrics)),
        "## How to load it",
        loading or _with_transformers(architecture),
        "## Limits",
        "The model reproduces its training text, including mistakes and bias. It was not evaluated beyond the figures "
        "above.",
    ]
    return "\n\n".join(sections) + "\n"


def _with_transformers(architecture: str) -> str:
    return (
        "```python\nfrom transformers import AutoTokenizer, " + architecture + "\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n'
        f'model = {architecture}.from_pretrained("PATH")\n```\n\n'
        "bert_jax takes the folder as `--checkpoint`, `--config.init_from`, or through `python -m bert_jax.convert`."
    )


def _average_sentence(average: str) -> str:
    if not average:
        return ""
    if average == MOVING_AVERAGE:
        return " The weights are a moving average over the training steps."
    return f" The weights are the mean of the last {average.partition(':')[2]} checkpoints."


def _task_section(loaded: LoadedModel) -> list[str]:
    if loaded.task is None:
        return []
    unlabelled = UNLABELLED.get(loaded.task["kind"], "a number")
    labels = ", ".join(f"`{label}`" for label in loaded.task["labels"]) or unlabelled
    return ["## Task", f"{loaded.task['name']} ({loaded.task['kind']}). Answers: {labels}."]


def _training_rows(training: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the most important settings of the run by configuration key."""
    wanted = (
        "data.train",
        "data.mixture",
        "task.train",
        "init_from",
        "branch_from",
        "batch_size",
        "steps",
        "tokens",
        "budget_minutes",
        "optimizer.name",
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "optimizer.weight_decay",
        "optimizer.schedule",
        "optimizer.ema_decay",
        "compute_dtype",
        "seed",
    )
    found = {}
    for key in wanted:
        value: Any = training
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else None
        if value not in (None, "", 0, 0.0):
            found[key] = value
    return found


def _metric_rows(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the numbers of result.json by dotted name."""
    rows: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            rows |= _metric_rows(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            rows[f"{prefix}{name}"] = f"{value:.4f}" if isinstance(value, float) else value
    return rows


def _table_section(title: str, rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return [f"## {title}", "\n".join(["| | |", "|---|---|", *lines])]
