"""Serves OpenAI's Responses API, which converts items to the conversation that chats have.

Requests run through the code path of OpenAI's chats, which this package gives a dialect.
"""
