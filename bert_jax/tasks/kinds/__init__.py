"""The kinds of tasks. The modules of a kind have its name as their prefix.

classification    a class, or a score (regression), for a text or a pair of texts
multilabel        any number of classes for a text or a pair of texts
choice            the correct one of several texts that may follow a context
tagging           a tag for every word
token_regression  a number for every word
question          an answer that is a part of a context, or none
embedding         a vector of each text, trained on pairs
span              spans of words, which may nest, and their relations
words             what the kinds that label words share
labels            the names of labels, and the options of all kinds with a cross-entropy over them
target_scale      the scale of the numbers of both regressions
"""
