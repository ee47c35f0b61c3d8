"""The router's HTTP interface: the server, its pages, and the OpenAI API in `openai/`.

The package translates between HTTP and the request pipeline. It makes no routing decisions.
"""
