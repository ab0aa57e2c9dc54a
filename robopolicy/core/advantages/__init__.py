"""The advantage pipeline: small stages `(advantage, decisions) -> advantage`, composed left to right."""
