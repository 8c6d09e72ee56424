"""Cleaning of text, as bert-jax clean runs it: rules.py has the published rules and identifies languages, unit.py
cleans one unit of documents and computes the signatures of near-duplicates, and job.py removes duplicates across units
and reports what was kept and dropped.
"""
