"""`ullage batch` answers a file of requests in OpenAI's batch format, and goes on where it stopped.

`lines` reads and writes the format, and touches no network. `sender` sends requests, and knows
nothing of files.
"""
