"""Archives of diverse policies: DCG-MAP-Elites and STAX."""
