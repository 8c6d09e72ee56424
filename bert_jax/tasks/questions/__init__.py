"""Questions whose answer is a part of a text (SQuAD: Rajpurkar et al. 2016, 2018).

reading   SQuAD's JSON, and records of question, context and answers
windows   a question and a context as rows, which slide over a long context
answers   the best spans of a row, and of all rows of a question
metrics   exact match and F1 of words, as the official scripts of SQuAD 1.1 and 2.0 have them
"""
