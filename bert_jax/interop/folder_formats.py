"""The files by which the formats of folders are recognized."""

from pathlib import Path

BERT_CONFIG_FILE = "bert_config.json"  # of Google's original BERT checkpoints
PROGRAMS_FILE = "programs.json"  # of StableHLO programs
ONNX_FILE = "model.onnx"


def is_original_bert(path: Path) -> bool:
    """Returns whether a folder, or the prefix of a checkpoint in a folder, is in Google's format."""
    folder = path if path.is_dir() else path.parent
    return (folder / BERT_CONFIG_FILE).exists() and not (folder / "config.json").exists()
