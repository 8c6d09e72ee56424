"""Vocabularies of trained models that grow or shrink, and the rows of the model that follow."""
