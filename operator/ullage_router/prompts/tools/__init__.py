"""Tool calls: from the functions that a request offers to the calls in an answer.

The package depends on prompts, grammars and answer texts, but on neither engines nor queues.
"""
