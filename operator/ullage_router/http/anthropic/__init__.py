"""Serves Anthropic's Messages API, which converts blocks to the conversation that chats have.

Requests run through the code path of OpenAI's chats, which this package gives a dialect.
"""
