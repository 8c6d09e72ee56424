"""Reads and writes LoRA adapters in Hugging Face peft's format; reading merges them into their base model.

adapter_config.json         rank, scale and targets, and the base model: a Hugging Face folder, or a name of the Hub
adapter_model.safetensors   lora_A [r, in] and lora_B [out, r] of each matrix; whole modules, such as the classifier
task.json                   architectures, labels and task, as in a Hugging Face config.json; only bert_jax writes it

Next to them are the tokenizer, README.md, and for vectors the files of sentence-transformers.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.interop import card_metadata, huggingface, model_card, sentence_transformers
from bert_jax.interop import family as families
from bert_jax.interop.family import LAYERS, Entry, Family, check_fixed
from bert_jax.interop.huggingface_export import class_for, family_for, save_tokenizer, task_fields, written_vectors
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.sentence_transformers import read_optional
from bert_jax.interop.weights import SafetensorsFolder, open_tensors, save_tensors
from bert_jax.model import lora
from bert_jax.storage import location
from bert_jax.storage.files import atomic_folder, read_json, write_json

CONFIG_FILE, WEIGHTS_FILE, TASK_FILE = "adapter_config.json", "adapter_model.safetensors", "task.json"
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
# How class names end, by peft's task type.
TASK_TYPES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": "LMHeadModel",
    "FEATURE_EXTRACTION": "Model",  # last, because other classes may end so, too
}
_FIXED: families.Fixed = (
    ("peft_type", ("LORA",)),
    ("bias", ("none", None)),
    ("use_dora", (False, None)),
    ("alpha_pattern", ({}, None)),
    ("lora_bias", (False, None)),
    ("layer_replication", (None,)),
    ("target_parameters", (None,)),
    ("trainable_token_indices", (None,)),
    # With other values peft changes the base model when it loads it (PiSSA, OLoRA, LoftQ, CorDA), or its forward pass.
    ("init_lora_weights", (True, False, None, "gaussian", "eva", "orthogonal")),
    ("use_qalora", (False, None)),
    ("use_bdlora", (False, None)),
    ("alora_invocation_tokens", (None,)),
    ("kasa_config", (None,)),
    ("velora_config", (None,)),
    ("monteclora_config", (None,)),
)


def is_adapter_folder(path: Path) -> bool:
    """Whether a folder holds adapters without their base model."""
    return (path / CONFIG_FILE).exists()


def read(directory: Path) -> LoadedModel:
    """Reads adapters, merged into their base model.

    The base model's heads that the adapters' class lacks are left out, as in transformers, and reported.

    Raises:
        UserError: The adapters are of another kind, a tensor does not belong to the base model, or
            adapter_config.json names neither a folder with that model nor one of the Hub.
    """
    file = directory / CONFIG_FILE
    values = read_json(file)
    check_fixed(file, values, _FIXED)
    base = _base_folder(directory, values.get("base_model_name_or_path"))
    config = huggingface.read_config(base)
    # The base model's files of sentence-transformers take precedence over a task in its config.json.
    if sentence_transformers.is_folder(base):
        config.pop(huggingface.TASK_FIELD, None)
    family, class_name = huggingface.named_family(base / huggingface.CONFIG_FILE, config)
    task = read_optional(directory / TASK_FILE)
    task_type = values.get("task_type")
    # peft has no task type for e.g. multiple choice, so bert_jax also writes the class.
    if architectures := task.get("architectures"):
        _, class_name = huggingface.named_family(directory / TASK_FILE, {**config, "architectures": architectures})
    elif task_type is not None:
        start = family.base_class.removesuffix("Model")
        known = {kind: start + end for kind, end in TASK_TYPES.items() if start + end in family.classes}
        class_name = families.choose(file, "task_type", task_type, known)
    config = {**config, "architectures": [class_name], **task}
    weights = AdaptedFolder(base, family, class_name, directory, values)
    # The labels may be the base model's, whose classifier had another size.
    labels, counts = config.get("id2label"), huggingface.output_counts(family, class_name, weights)
    if labels and any(count != len(labels) for count in counts.values()):
        del config["id2label"]
    return huggingface.assemble(directory, base / huggingface.CONFIG_FILE, config, weights)


class AdaptedFolder(SafetensorsFolder):
    """A base model's tensors with merged adapters and replaced modules, without other classes' heads."""

    dtype = "float32"  # which holds the merged matrices
    leaves_heads_out = False  # all adapters belong to the model

    def __init__(self, base: Path, family: Family, class_name: str, directory: Path, values: Mapping[str, Any]) -> None:
        super().__init__(base, family.prefix)
        # Tensors of other classes' heads would count as unexpected.
        own, heads = (
            {name for kind in classes for part in family.parts(kind).values() for entry in part for name in entry.names}
            for classes in ([class_name], family.classes)
        )
        if left_out := sorted((heads - own) & self._names.keys()):
            huggingface.report(f"{base}: not used by {class_name}, left out: {', '.join(left_out)}")
        self.leave_out(left_out)
        self._file = file = directory / WEIGHTS_FILE
        alpha = values.get("lora_alpha", 8)
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and math.isfinite(alpha)
        if not number or not file.is_file():
            raise UserError(
                f"{file} is missing. Download it next to {directory / CONFIG_FILE}"
                if number
                else f"{directory / CONFIG_FILE}: lora_alpha is {alpha!r:.60}; expected a number"
            )
        self._alpha, self._stabilized = float(alpha), bool(values.get("use_rslora"))
        self._transposed = bool(values.get("fan_in_fan_out"))
        self._pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # (A, B) by bare name of the matrix
        self._replaced: dict[str, np.ndarray] = {}
        stored = open_tensors(file)
        tensors = {name: stored.get_tensor(name).astype(np.float32) for name in stored.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            bare = name.removeprefix(PREFIX).removeprefix(family.prefix)
            if ".lora_" not in bare:
                self._replaced[bare] = tensor
                continue
            # Every pair is met twice, by its A and its B, so that a tensor without the other one is found.
            stem = re.sub(r"\.lora_[AB]\.weight$", "", name)
            matrix = f"{stem.removeprefix(PREFIX).removeprefix(family.prefix)}.weight"
            a, b = tensors.get(stem + LORA_A), tensors.get(stem + LORA_B)
            problem = ""
            if stem == name or a is None or b is None:
                problem = f"is not supported; expected pairs of {LORA_A} and {LORA_B}"
            elif matrix not in self._names:
                problem = (
                    f"adapts {matrix}, which {base} does not have. Name the model that was adapted by "
                    f"base_model_name_or_path in {directory / CONFIG_FILE}"
                )
            elif not (a.ndim == b.ndim == 2 and len(a) == b.shape[1]):
                problem = (
                    f"has a pair with the shapes {a.shape} and {b.shape}; expected [r, in] and [out, r], the same r"
                )
            if problem or a is None or b is None:
                raise UserError(f"{file}: tensor {name} {problem}")
            self._pairs[matrix] = a, b

    def __getitem__(self, bare: str) -> np.ndarray:
        if bare in self._replaced:
            return self._replaced[bare]
        tensor = super().__getitem__(bare)
        if bare not in self._pairs:
            return tensor
        a, b = self._pairs[bare]
        rank = len(a)
        # [out, in], like the matrix; rsLoRA divides by the root, so that the scale does not vanish at high ranks.
        change = (b @ a) * np.float32(self._alpha / (math.sqrt(rank) if self._stabilized else rank))
        change = change.T if self._transposed else change
        if change.shape != tensor.shape:
            raise UserError(f"{self._file}: the adapter of {bare} has shape {change.shape}, not {tensor.shape}")
        return tensor + change

    def __contains__(self, bare: object) -> bool:
        return bare in self._replaced or bare in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names | self._replaced)

    def __len__(self) -> int:
        return len(self._names | self._replaced)

    def shape(self, bare: str) -> tuple[int, ...]:
        return self._replaced[bare].shape if bare in self._replaced else super().shape(bare)

    def describe(self, bare: str) -> str:
        return f"{self._file}: tensor {bare}" if bare in self._replaced else super().describe(bare)


def _base_folder(directory: Path, name: object) -> Path:
    """The base model's folder: a path, also relative to the adapters' folder, or a name on the Hub."""
    for folder in (Path(str(name)), directory / str(name)) if name else ():
        if (folder / huggingface.CONFIG_FILE).exists():
            return folder
    address = str(location.model_address(str(name)))
    problem = f" is {name!r}, neither a model's folder nor a name on the Hugging Face Hub. Set the field to one of them"
    if name and address.startswith(location.PREFIX):
        try:
            return Path(location.named_folder(address))
        except UserError as error:
            problem = f": {error}"
    raise UserError(f"{directory / CONFIG_FILE}: base_model_name_or_path{problem}")


def write(loaded: LoadedModel, directory: str | Path, base: str = "") -> None:
    """Writes the adapters and trained heads of a model that was opened with merged=False.

    `base` is the base model's Hugging Face folder; empty for the run's init_from.

    Raises:
        UserError: The model has no adapters, `base` is another model or in another format, or peft adapts the family's
            matrices in another way.
    """
    config = loaded.model.lora
    if config is None:
        raise UserError(
            f"{loaded.origin} has no adapters, or they are merged. Export the workdir of a run with config.lora.rank, "
            "or use --format hf"
        )
    base = base or str(loaded.training.get("init_from", ""))
    original = _read_base(Path(location.named_folder(base)), loaded)
    family = family_for(loaded)
    class_name = class_for(family, loaded.heads)
    table = family.table(class_name)
    modules = []
    tensors: dict[str, np.ndarray] = {}
    entries = {entry.path: entry for entry in family.encoder}
    for matrix in config.matrices:
        # bert_jax joins queries, keys and values in one kernel; `part` is the index of one of them.
        path, part = lora.kernel_path(matrix)
        names = entries[path].names
        if part is not None and len(names) == 1:
            raise UserError(
                f"the Hugging Face format of {family.title} holds queries, keys and values in one matrix, so peft has "
                f"no adapter of {matrix} alone. Use --format hf, which merges adapters"
            )
        module = names[part or 0].removesuffix(".weight")
        modules.append(module)
        # A is [in, r] here and [r, in] in peft, B [r, out] and [out, r]; heads are joined.
        for name, end, shape in (("a", LORA_A, (-1, config.rank)), ("b", LORA_B, (config.rank, -1))):
            for layer, value in enumerate(loaded.params[f"{matrix}{lora.SUFFIX}/{name}"]):
                tensors[module.format(layer) + end] = value.reshape(shape).T
    changed = _changed_modules(loaded, original, family, table)
    values = {
        "peft_type": "LORA",
        "task_type": next((kind for kind, end in TASK_TYPES.items() if class_name.endswith(end)), None),
        "base_model_name_or_path": base.removeprefix(location.PREFIX),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "target_modules": _target_modules(modules, table),
        "modules_to_save": sorted({name.split(".")[0] for name in changed}) or None,
        "bias": "none",
        "fan_in_fan_out": family.model_type == "gpt2",
        "inference_mode": True,
    }
    with atomic_folder(directory) as unfinished:
        write_json(unfinished / CONFIG_FILE, values)
        write_json(unfinished / TASK_FILE, {"architectures": [class_name], **task_fields(loaded)})
        save_tokenizer(loaded, unfinished)
        if vectors := written_vectors(loaded):
            sentence_transformers.write(vectors, loaded.model.width, unfinished)
        count = sum(value.size for value in (tensors | changed).values())
        card = model_card.render(loaded, family, class_name, count, _loading(loaded, class_name, values))
        (unfinished / card_metadata.CARD_FILE).write_text(card, encoding="utf-8")
        named = {f"{PREFIX}{family.full_name(bare, class_name)}": value for bare, value in (tensors | changed).items()}
        save_tensors(named, unfinished / WEIGHTS_FILE)


def _loading(loaded: LoadedModel, class_name: str, values: Mapping[str, Any]) -> model_card.Loading:
    """The model card's section on how to load the adapters on their base model."""
    # The base model's labels are others, or none.
    outputs = loaded.heads.classes or loaded.heads.tags
    further = f", num_labels={outputs}" if outputs else ""
    base = values["base_model_name_or_path"]
    section = (
        f"The base model is `{PurePath(base).name if Path(base).is_absolute() else base}`.\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import AutoTokenizer, {class_name}\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n'
        f'base = {class_name}.from_pretrained("BASE"{further})\n'
        'model = PeftModel.from_pretrained(base, "PATH")\n```\n\n'
        f"`{TASK_FILE}` has the labels by output. bert_jax takes the folder as `--checkpoint`."
    )
    return model_card.Loading("peft", section, tags=("lora",))


def _read_base(folder: Path, loaded: LoadedModel) -> LoadedModel:
    """Reads the base model, and checks that its encoder was adapted: training changed nothing else there."""
    file = folder / huggingface.CONFIG_FILE
    if not file.exists() or "model_type" not in read_json(file):
        raise UserError(
            f"peft needs the Hugging Face folder of the base model, but {folder} is not one. Write it with "
            f"bert-jax export --checkpoint {folder} --output DIR, and add --base DIR"
        )
    original = huggingface.read(folder)
    for path, value in loaded.params.items():
        if not path.startswith(("embeddings/", "encoder/")) or lora.is_adapter(path):
            continue
        known = original.params.get(path)
        # Reading drops the token types that the tokenizer never gives.
        if known is not None and path == huggingface.SEGMENT_TABLE:
            value = value[: len(known)]
        if known is None or not np.array_equal(known, value):
            raise UserError(f"{folder} is not the model that was adapted: {path} differs. Name that one with --base")
    return original


def _changed_modules(
    loaded: LoadedModel, original: LoadedModel, family: Family, table: tuple[Entry, ...]
) -> dict[str, np.ndarray]:
    """Returns the tensors of modules outside the encoder that are missing from the base model or differ from it."""
    # Only heads and the pooler can differ: `_read_base` compared the rest.
    plain = {path: value for path, value in loaded.params.items() if not lora.is_adapter(path)}
    tensors = families.export_tensors(table, plain, loaded.model)
    heads = {name for entry in table if entry not in family.encoder for name in entry.names if name in tensors}
    base_table = family.table(class_for(family, original.heads))
    known = families.export_tensors(base_table, original.params, original.model)
    # peft replaces whole modules, so one changed tensor takes the others of its module along.
    changed = {name.split(".")[0] for name in heads if not np.array_equal(known.get(name, np.empty(0)), tensors[name])}
    return {name: tensors[name] for name in sorted(heads) if name.split(".")[0] in changed}


def _target_modules(modules: list[str], table: tuple[Entry, ...]) -> list[str] | str:
    """peft's target_modules: the ends of the modules' names, or a regex if other modules have such ends."""
    kernels = [entry for entry in table if entry.path.startswith(LAYERS) and entry.path.endswith("/kernel")]
    others = {name.removesuffix(".weight") for entry in kernels for name in entry.names}.difference(modules)
    # peft adapts every module whose name ends so, in all layers.
    ends = sorted(module.rpartition("{}.")[2] for module in modules)
    if not any(other.endswith(f".{end}") for end in ends for other in others):
        return ends
    escaped = (re.escape(module).replace(r"\{\}", r"\d+") for module in sorted(modules))
    return rf"(.*\.)?({'|'.join(escaped)})"
