"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings. No torch, no network."""
