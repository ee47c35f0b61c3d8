"""OpenAI's API: request bodies, answers, server-sent events, and errors in OpenAI's envelope.

The package depends on the pipeline's calls and answers. It depends on neither sockets nor engines.
"""
