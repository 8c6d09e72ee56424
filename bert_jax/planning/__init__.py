"""Estimates the cost of a training run on TPUs and GPUs by asking their compilers; no device is needed.

topology.py   names of devices, their published figures, and how to open them for a compiler
compile.py    compiles a recipe's train step from abstract shapes: the program and its memory
program.py    reads the program's text: cycles, bytes, collectives; and counts the traced step's FLOPs
estimate.py   step time, MFU, hours, tokens and input rate, as a document and as JSON
"""
