"""What a grammar may cost, the same wherever one is compiled."""

from llguidance import LLParserLimits

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""States take 1 to 2 kB each and are made while text is matched, so these bound the memory of one
answer's grammar; fuel and items bound its time: about 20 ms to begin with, 15 ms a token."""
