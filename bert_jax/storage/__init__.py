"""Files, folders and object stores: atomic writes, gs:// and s3:// addresses, compressed files.

local        files and folders on disk that are either complete or absent, each written by one job at a time
remote       folders and files on disk and in object stores behind one interface
listing      finding files by glob patterns
compression  the content of .gz, .xz and .zst files
"""
