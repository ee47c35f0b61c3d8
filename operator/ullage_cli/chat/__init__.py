"""`ullage chat`: a conversation with a running service in the terminal.

`client` speaks OpenAI's API, `conversation` holds the messages and its commands, and `command`
reads from the terminal.
"""
