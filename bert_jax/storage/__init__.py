"""Files, folders and object stores: atomic writes, gs://, s3:// and hf:// addresses, compressed files.

local          files and folders on disk that are either complete or absent, each written by one job at a time
location       folders of runs on disk, in Google Cloud Storage and in S3, by the interface of pathlib
stores         what differs between these two stores
holder         a folder, on disk or in an object store, that one run at a time holds
conditional    objects in stores that are written only if their version is the expected one
scratch        temporary folders on disk for large files on their way to or from a store
holder_record  the process that holds a folder
remote         folders and files on disk and in object stores behind one interface
ranges         ranges of bytes of files on disk and in object stores, read by many threads
hub            the Hugging Face Hub as one of these stores
hub_models     models of the Hub by their names
listing        finding files by glob patterns
compression    the content of .bz2, .gz, .xz and .zst files
"""
