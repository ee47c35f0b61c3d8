"""Tool calls: from the functions of a request to the calls in an answer.

The package knows prompts, grammars and answer texts. It knows neither engines nor queues.
"""
