"""The console: a page that shows engines, queue and decisions live, and the events that it reads.

It owns the files of the page and the readers of the events. It watches, and sends requests as any
client does: it knows nothing of how they are decided about.
"""
