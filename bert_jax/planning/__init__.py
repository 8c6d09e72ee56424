"""Estimates what a training run costs on TPUs and GPUs by asking their compilers; no device is needed.

topology.py   names of devices, their published figures, and how to open them for a compiler
compile.py    the train step of a recipe as abstract shapes, compiled: the program and its memory
program.py    what the text of the program says: cycles, bytes, collectives; and FLOPs of the traced step
estimate.py   step time, MFU, hours, tokens and input rate, as a document and as JSON
"""
