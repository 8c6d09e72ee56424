"""Estimates what a training step costs on TPUs and GPUs by asking their compilers; no device is needed."""
