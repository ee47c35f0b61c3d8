"""OpenAI's API: request bodies, answers, server-sent events, and errors in OpenAI's envelope.

The package uses the pipeline's calls and answers, but does not depend on sockets or engines.
"""
