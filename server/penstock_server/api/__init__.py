"""The HTTP surface: routes parse their parameters, call the data path, and stream or serialise the result."""
