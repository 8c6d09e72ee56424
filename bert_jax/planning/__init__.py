"""Estimates the cost of a training run on TPUs and GPUs by asking their compilers; no device is needed.

topology.py   turns names of devices into published figures, and opens the devices for their compiler
compile.py    compiles a recipe's train step from abstract shapes, and reports its memory
program.py    reads cycles, bytes and collectives from the program's text, and counts the traced step's FLOPs
estimate.py   turns these into step time, MFU, hours, tokens and input rate, as a document and as JSON
"""
