"""The kinds of tasks, one module each; the two with the most code have a second module for their data.

choice            the correct one among several texts that may follow a context
classification    a class, a score (regression) or a set of labels (multilabel) for a text or a pair
embedding         a vector for each text, trained on pairs
question          an answer within a context, or none; question_data has its files and rows
span              spans of words, which may nest, and their relations; span_data has its files, rows and objective
tagging           a tag for every word
token_regression  a number for every word
"""
