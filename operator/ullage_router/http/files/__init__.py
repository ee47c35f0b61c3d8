"""Serves OpenAI's Files API, and replaces the files that requests name by their texts.

The files themselves are in `ullage_router.files`.
"""
