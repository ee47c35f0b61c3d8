"""Tool calling: turns function definitions into prompts and grammars, and parses tool calls.

The package handles only prompts, grammars and response texts. It depends on neither engines nor
queues.
"""
