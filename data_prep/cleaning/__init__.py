"""Cleaning of text, as bert-jax clean runs it: rules.py has the published rules and the identification of languages,
unit.py applies them to one unit of documents and computes the signatures of near-duplicates, and job.py removes
duplicates across units and reports what was kept and dropped.
"""
