"""Quality of text: rules for documents and lines, languages, and near-duplicates.

rules            named sets of published rules      near_duplicates  MinHash and locality-sensitive hashing
languages        language identification            merging          duplicates across units, in the order of the text
unit             the work of one unit               report           what was kept and dropped, as JSON and as a page
lineage          reports next to the text of a job
"""
