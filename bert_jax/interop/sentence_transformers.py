"""Reads and writes the files that a sentence-transformers folder adds to the Hugging Face format.

modules.json                        the modules in order: Transformer, Pooling, Normalize; a Dropout does nothing
1_Pooling/config.json               the pooling
sentence_bert_config.json           max_seq_length, do_lower_case; old folders name it after another family
config_sentence_transformers.json   prompts, default_prompt_name, similarity_fn_name, truncate_dim

They become a task of the kind `embedding` (bert_jax/tasks/kinds/embedding.py). If bert_jax cannot compute something,
such as another module, the task's pooling describes it: the model opens, but computing vectors is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.heads.config import pool_parts
from bert_jax.storage.files import read_json, write_json
from bert_jax.tokenization.vocabulary import Vocabulary

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
# Its names in old folders, in the library's order.
OLD_LENGTH_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
PROMPTS_FILE = "config_sentence_transformers.json"
TOKENIZER_FILE = "tokenizer_config.json"
KIND = "embedding"
COSINE, DOT = "cosine", "dot"  # how vectors are compared: by cosines unless a folder says otherwise
# Pooling's settings that every version of sentence-transformers reads, in the order in which vectors are concatenated.
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
NAMES = {mode: "last" if mode == "lasttoken" else mode for mode in MODES.values()}
# Prompts that the library's encode_document knows but never uses: every model has a prompt `document`, maybe empty.
UNUSED_PROMPTS = ("passage", "corpus")


def is_folder(directory: Path) -> bool:
    """Whether sentence-transformers wrote a Hugging Face folder."""
    return (directory / MODULES_FILE).is_file()


def read_optional(path: Path) -> dict[str, Any]:
    """Reads a JSON file; empty if there is none."""
    return read_json(path) if path.exists() else {}


def read_task(directory: Path, model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Reads a folder's task, without a name.

    Raises:
        UserError: A file is damaged.
    """
    file = directory / MODULES_FILE
    try:
        modules, problem = json.loads(file.read_text(encoding="utf-8")), "a list of modules"
    except (OSError, ValueError, RecursionError) as error:
        modules, problem = None, f"valid JSON ({error})"
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{file} is not {problem}. Download it again")
    # One pooling, and whatever cannot be computed.
    poolings = []
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            values = read_json(directory / str(module.get("path", "")) / "config.json")
            modes = values.get("pooling_mode")
            if modes is None:  # older folders have a flag for each mode
                modes = [name for key, name in MODES.items() if values.get(key)] or ["mean"]
            modes = [modes] if isinstance(modes, str) else list(modes)
            # Unknown modes and settings become a part of the name, so that has_known_pooling refuses them later.
            pooling = " + ".join(NAMES.get(mode, str(mode)) for mode in modes)
            poolings.append(pooling if values.get("include_prompt", True) else f"{pooling} without the prompt")
        elif kind == "Normalize":
            normalize = True
        # Dropout has no effect when vectors are computed.
        elif kind not in ("Transformer", "Dropout"):
            poolings.append(f"{kind} ({MODULES_FILE})")
    name = next((name for name in (LENGTH_FILE, *OLD_LENGTH_FILES) if (directory / name).exists()), LENGTH_FILE)
    length = read_optional(directory / name)
    if length.get("do_lower_case") and not vocabulary.lowercase:
        poolings.append(f"of lower-cased text ({name})")
    limit = length.get("max_seq_length") or read_optional(directory / TOKENIZER_FILE).get("model_max_length")
    # bool is a subclass of int; tokenizers without a limit have a very large float.
    limit = limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else model.max_positions
    return {
        "kind": KIND,
        "labels": [],
        "max_length": min(limit, model.max_positions),
        "pooling": ", ".join(poolings) or "mean",
        "normalize": normalize,
        **_read_settings(directory / PROMPTS_FILE),
    }


def _read_settings(path: Path) -> dict[str, Any]:
    values = read_optional(path)
    prompts, size, problem = values.get("prompts") or {}, values.get("truncate_dim") or 0, ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        problem = f"prompts is {prompts!r:.60}; expected a text for each name"
    elif not isinstance(size, int) or isinstance(size, bool) or size < 0:
        problem = f"truncate_dim is {size!r:.60}; expected a number of dimensions, or null for all"
    if problem:
        raise UserError(f"{path}: {problem}")
    prompts = {name: text or "" for name, text in prompts.items()}
    return {
        "prompt": prompts.get(values.get("default_prompt_name") or "", ""),
        "query_prompt": prompts.get("query", ""),
        "document_prompt": prompts.get("document", ""),
        "prompts": [list(item) for item in prompts.items()],
        "similarity": str(values.get("similarity_fn_name") or COSINE),
        "truncate_dim": size,
    }


def write(task: Mapping[str, Any], width: int, directory: Path) -> None:
    """Writes an embedding task's files into a Hugging Face folder.

    Args:
        task: The keys of read_task; prompts, similarity and truncate_dim may be absent.
        width: The model's width.
        directory: The folder.
    """
    kinds = ["Transformer", "Pooling", *(["Normalize"] if task["normalize"] else [])]
    modules = []
    for index, kind in enumerate(kinds):
        path = f"{index}_{kind}" if index else ""  # the Transformer is the folder itself
        (directory / path).mkdir(exist_ok=True)
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": kind})
    (directory / MODULES_FILE).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    # Flags, because older versions do not know `pooling_mode`.
    parts = pool_parts(task["pooling"])
    modes: dict[str, Any] = {key: NAMES[mode] in parts for key, mode in MODES.items()}
    if [NAMES[mode] for key, mode in MODES.items() if modes[key]] != parts:  # only newer versions know another order
        modes = {"pooling_mode": [mode for part in parts for mode, name in NAMES.items() if name == part]}
    pooling = {"word_embedding_dimension": width, **modes, "include_prompt": True}
    write_json(directory / "1_Pooling" / "config.json", pooling)
    write_json(directory / LENGTH_FILE, {"max_seq_length": task["max_length"], "do_lower_case": False})
    write_json(directory / PROMPTS_FILE, written_settings(task))


def written_settings(task: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config_sentence_transformers.json; `task` is as in `write`."""
    named = {"query": task.get("query_prompt"), "document": task.get("document_prompt")}
    prompts = dict(task.get("prompts") or ()) | {name: text for name, text in named.items() if text}
    # The format names its default prompt, so a text without a name gets one.
    default = None
    if text := task.get("prompt"):
        default = next((name for name, known in prompts.items() if known == text), "default")
        prompts[default] = text
    values = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": task.get("similarity", COSINE),
    }
    return values | ({"truncate_dim": task["truncate_dim"]} if task.get("truncate_dim") else {})


def has_known_pooling(task: Mapping[str, Any]) -> bool:
    """Whether bert_jax can compute and write an embedding task's pooling."""
    return all(part in NAMES.values() for part in pool_parts(task["pooling"]))


def refuse_unknown_pooling(origin: str, task: Mapping[str, Any] | None) -> None:
    """Refuses an embedding task whose vectors bert_jax cannot compute."""
    if task and task.get("kind") == KIND and not has_known_pooling(task):
        raise UserError(
            f"{origin}: its vectors need {task['pooling']}, which is not supported. Give another pooling to `bert-jax "
            f"embed --pool`, or remove {MODULES_FILE} to open the encoder alone"
        )


def prompt_texts(task: Mapping[str, Any]) -> list[str]:
    """All prompts of an embedding task, as texts."""
    named = [text for _, text in task.get("prompts") or ()]
    texts = [task.get(key) for key in ("prompt", "query_prompt", "document_prompt")]
    return list(dict.fromkeys(text for text in (*texts, *named) if text))


def unused_document_prompt(task: Mapping[str, Any]) -> str:
    """Names a prompt that may be meant for documents if the task has no document prompt; empty for none."""
    prompts = {} if task.get("document_prompt") else dict(task.get("prompts") or ())
    return next((name for name in UNUSED_PROMPTS if prompts.get(name)), "")
