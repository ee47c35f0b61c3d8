"""Tool calling, from the functions that a request offers to the calls in an answer.

The package deals only with prompts, grammars and answer texts. It depends on neither engines nor
queues.
"""
