"""OpenAI's API: request bodies, answers, server-sent events, and errors in OpenAI's envelope.

The package uses the pipeline's calls and answers, but does not depend on sockets or engines. Its
`endpoint.py` is the path of every endpoint that generates text, also in other APIs.
"""
