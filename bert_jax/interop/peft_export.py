"""Writes LoRA adapters in the format of Hugging Face peft; peft.py reads it and lists its files."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert_jax.config.model import LoraConfig
from bert_jax.errors import UserError
from bert_jax.interop import family as name_table
from bert_jax.interop import huggingface
from bert_jax.interop.family import LAYERS, Entry, Family
from bert_jax.interop.huggingface import save_tensors
from bert_jax.interop.huggingface_export import architecture_of, family_of, task_fields
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.peft import CONFIG_FILE, LORA_A, LORA_B, PREFIX, TASK_FILE, TASK_TYPES, WEIGHTS_FILE
from bert_jax.model import lora
from bert_jax.storage.files import atomic_folder, read_json, write_json
from bert_jax.storage.hub import PREFIX as HUB
from bert_jax.storage.hub import named_folder

Tensors = dict[str, np.ndarray]


def write(loaded: LoadedModel, directory: str | Path, base: str = "") -> None:
    """Writes the adapters and the trained heads of a model that was read unmerged (merged=False).

    base is the Hugging Face folder of the model that was adapted; empty for the run's init_from. Raises UserError for a
    model without adapters, for a base that is another model or in another format, and for a family whose matrices peft
    adapts in another way.
    """
    config = loaded.model.lora
    if config is None:
        raise UserError(
            f"{loaded.origin} has no adapters, or they are merged. Export the workdir of a run with config.lora.rank, "
            "or use --format hf"
        )
    base = base or str(loaded.training.get("init_from", ""))
    folder = Path(named_folder(base))
    original = _read_base(folder, loaded)
    family = family_of(loaded)
    architecture = architecture_of(family, loaded.heads)
    table = family.table(architecture)
    modules = _modules(config, family)
    changed = _changed_modules(loaded, original, family, table)
    tensors = _adapter_tensors(loaded, config, modules) | changed
    values = {
        "peft_type": "LORA",
        "task_type": next((kind for kind, end in TASK_TYPES.items() if architecture.endswith(end)), None),
        "base_model_name_or_path": base.removeprefix(HUB),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "target_modules": _targets(list(modules.values()), table),
        "modules_to_save": sorted({name.split(".")[0] for name in changed}) or None,
        "bias": "none",
        "fan_in_fan_out": family.model_type == "gpt2",
        "inference_mode": True,
    }
    with atomic_folder(directory) as unfinished:
        write_json(unfinished / CONFIG_FILE, values)
        write_json(unfinished / TASK_FILE, {"architectures": [architecture], **task_fields(loaded)})
        full = {f"{PREFIX}{family.full_name(name, architecture)}": tensor for name, tensor in tensors.items()}
        save_tensors(full, unfinished / WEIGHTS_FILE)


def _read_base(folder: Path, loaded: LoadedModel) -> LoadedModel:
    """Reads the model that was adapted, after checking that it is that one."""
    file = folder / huggingface.CONFIG_FILE
    if not file.exists() or "model_type" not in read_json(file):
        raise UserError(
            f"peft needs the Hugging Face folder of the base model, but {folder} is not one. Write it with "
            f"bert-jax export --checkpoint {folder} --output DIR, and add --base DIR"
        )
    original = huggingface.read(folder)
    for path, value in loaded.params.items():
        frozen = path.startswith(("embeddings/", "encoder/")) and not lora.is_adapter(path)
        known = original.params.get(path)
        if known is not None and path == huggingface.SEGMENT_TABLE:  # without the types that its tokenizer never gives
            value = value[: len(known)]
        if frozen and not (known is not None and np.array_equal(known, value)):
            raise UserError(f"{folder} is not the model that was adapted: {path} differs. Name that one with --base")
    return original


def _modules(config: LoraConfig, family: Family) -> dict[str, str]:
    """Returns the bare name of the module of each adapted matrix, with {} for the layer."""
    entries = {entry.path: entry for entry in family.encoder}
    modules = {}
    for matrix in config.matrices:
        path, part = lora.kernel_of(matrix)
        names = entries[path].names
        if part is not None and len(names) == 1:
            raise UserError(
                f"the Hugging Face format of {family.title} holds queries, keys and values in one matrix, so peft has "
                f"no adapter of {matrix} alone. Use --format hf, which merges adapters"
            )
        modules[matrix] = names[part or 0].removesuffix(".weight")
    return modules


def _adapter_tensors(loaded: LoadedModel, config: LoraConfig, modules: Mapping[str, str]) -> Tensors:
    """Returns the tensors of the adapters by bare name."""
    tensors = {}
    for matrix, module in modules.items():
        for name, end, shape in (("a", LORA_A, (-1, config.rank)), ("b", LORA_B, (config.rank, -1))):
            for layer, value in enumerate(loaded.params[f"{matrix}{lora.SUFFIX}/{name}"]):
                tensors[module.format(layer) + end] = value.reshape(shape).T
    return tensors


def _changed_modules(loaded: LoadedModel, original: LoadedModel, family: Family, table: tuple[Entry, ...]) -> Tensors:
    """Returns the tensors of all modules outside the encoder that are missing from the base model or differ from it."""
    plain = {path: value for path, value in loaded.params.items() if not lora.is_adapter(path)}
    every = name_table.export_tensors(table, plain, loaded.model)
    heads = {name for entry in table if entry not in family.encoder for name in entry.names if name in every}
    base_table = family.table(architecture_of(family, original.heads))
    known = name_table.export_tensors(base_table, original.params, original.model)
    changed = {name.split(".")[0] for name in heads if not np.array_equal(known.get(name, np.empty(0)), every[name])}
    return {name: every[name] for name in sorted(heads) if name.split(".")[0] in changed}


def _targets(modules: list[str], table: tuple[Entry, ...]) -> list[str] | str:
    """Returns peft's target_modules: the ends of the modules' names, or a regex where other modules have such ends."""
    kernels = [entry for entry in table if entry.path.startswith(LAYERS) and entry.path.endswith("/kernel")]
    others = {name.removesuffix(".weight") for entry in kernels for name in entry.names}.difference(modules)
    ends = sorted(module.rpartition("{}.")[2] for module in modules)
    if not any(other.endswith(f".{end}") for end in ends for other in others):
        return ends
    escaped = (re.escape(module).replace(r"\{\}", r"\d+") for module in sorted(modules))
    return rf"(.*\.)?({'|'.join(escaped)})"
