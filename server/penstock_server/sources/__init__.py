"""Where shards lie: folders of this machine, object stores, the Hugging Face hub, and web servers.

stats         what identifies the version of a file or an object
remote        objects below a URL, read by ranges of a pinned version; folders and paths of them
remote_file   an object as a file, whose ranges are fetched ahead
objects       Amazon S3, Google Cloud Storage, Azure
hub, web      the Hugging Face hub, and lists of URLs
registry      sources by URL
recipe_files  copies of the small files that a recipe consists of
urls          tells a URL from a path

A local shard is a `Path`, and another a `RemotePath`. Both have a name, a parent, and a text for messages.
"""
