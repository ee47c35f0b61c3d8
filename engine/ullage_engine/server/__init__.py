"""The server process: gRPC, tokenizer, journal, supervisor; it outlives every worker."""
