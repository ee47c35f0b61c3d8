"""The console: a page that shows engines, queue and decisions live, and the events that it reads.

The folder owns the files of the page and the readers of the events. The console watches, and sends
requests as any client does. It does not know how requests are decided.
"""
