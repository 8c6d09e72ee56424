"""Files, folders and object stores: atomic writes, gs://, s3:// and hf:// addresses, compressed files.

files      files and folders on disk that are complete or absent, compressed files, temporary folders
remote     files and folders on disk, in stores and on the Hugging Face Hub by pyarrow: what data preparation reads
location   folders of runs on disk, in Google Cloud Storage and in S3, by the interface of pathlib
hold       a folder, on disk or in a store, that one run at a time holds
hub        models of the Hugging Face Hub by their names
"""
