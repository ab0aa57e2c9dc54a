"""Evolution strategies and bilevel optimisation."""
