"""The shared algorithm core: torch only; knows neither robots nor text."""
