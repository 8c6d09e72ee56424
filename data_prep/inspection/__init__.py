"""Inspection of shards: statistics, verification, and the document that inspect_shards prints or writes as a page."""
