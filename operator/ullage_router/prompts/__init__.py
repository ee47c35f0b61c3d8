"""What happens to a prompt before it is counted: cleansing, templates, truncation and
summaries.

It knows texts and tokens, and nothing of engines or queues.
"""
