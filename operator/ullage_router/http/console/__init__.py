"""The console: a live page of engines, queue and decisions, and the events that it reads.

The package owns the files of the page and the readers of the events. The console watches the
router, and sends requests like any client. It takes no part in decisions.
"""
