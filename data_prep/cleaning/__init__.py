"""Cleans text for bert-jax clean: rules.py has the published rules and identifies languages, unit.py cleans a unit and
computes signatures for near-duplicates, job.py removes duplicates across units and writes the report.
"""
