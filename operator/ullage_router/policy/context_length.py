"""Words the refusal of a prompt that is longer than the context."""


def too_long(noun: str, size: str, context: int, remedy: str) -> str:
    """Return the message of an error with the reason CONTEXT_TOO_LONG.

    SDKs drop an error's code from the text of their exceptions. LangChain, LiteLLM and others
    therefore search the text for phrases of OpenAI, Anthropic and vLLM: "prompt is too long" and
    "this model's maximum context length is".

    Args:
        noun: the prompt, or the input to embed.
        size: the sentence's part that gives the size.
        context: most tokens of prompt and answer together.
        remedy: how to change the request.
    """
    limit = f"this model's maximum context length is {context} tokens"
    return f"{noun} is too long: {size}, but {limit}; {remedy}"
