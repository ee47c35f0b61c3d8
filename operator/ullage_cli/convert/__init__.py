"""`ullage convert`: turns the manifests and commands of other servers into LLMServices.

Each format has a module of pure functions. A `SourceDocument` guarantees that no field of the input
is lost silently, because fields that nobody took are listed at the end.
"""
