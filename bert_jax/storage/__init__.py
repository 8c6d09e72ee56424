"""Files, folders and object stores: atomic writes, gs://, s3:// and hf:// addresses, compressed files.

files      complete or absent files and folders on disk, compressed files, temporary folders
remote     files and folders on disk, in stores and on the Hugging Face Hub by pyarrow, for data and shards
location   folders of runs on disk, in Google Cloud Storage and in S3, by the interface of pathlib
hold       a folder, on disk or in a store, that one run at a time holds
hub        models on the Hugging Face Hub by their names
"""
